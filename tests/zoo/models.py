"""All models of the zoo."""

from zoo.eqx_models import EQUINOX
from zoo.haiku_models import HAIKU
from zoo.linen import LINEN
from zoo.nnx_models import NNX
from zoo.plain import PLAIN

ZOO = [*LINEN, *NNX, *EQUINOX, *HAIKU, *PLAIN]
