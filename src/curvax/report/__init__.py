"""Tables and plots of results. It reads them only; a result's `plot()` imports it when called."""

from curvax.report._memory import plot_memory_plan as plot_memory_plan
from curvax.report._spectrum import plot_spectral_density as plot_spectral_density
