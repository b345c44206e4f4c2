"""Detection of layers in a traced program.

The modules, in the order in which detection works:

- `program`: a jaxpr as a `Program` of nodes, pruned to what the losses are computed from, and run
  again with hooks at some nodes.
- `axes`: where the axes of an array go when it is rearranged.
- `constants`: values that are known before the program runs.
- `examples`: the examples that each value is about, followed from the arguments to the losses.
- `candidates`: operations that may be uses of layers, one function for each kind of layer.
- `uses`: parameters, followed to the operations that consume them.
- `lifting`: an axis of examples for uses that compute the same for all examples.
- `layers`: uses of the same parameters, grouped into layers.
- `tagging`: each use described by a `LayerUse`, and tagged.
"""
