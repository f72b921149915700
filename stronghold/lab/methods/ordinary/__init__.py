"""What the methods have in common that are there to be compared with."""

from stronghold.lab.methods.ordinary.measuring import measure
from stronghold.lab.methods.ordinary.process import join_alone
from stronghold.lab.methods.ordinary.recomputing import recompute_layers
from stronghold.lab.methods.ordinary.refusing import reference_model

__all__ = ["join_alone", "measure", "recompute_layers", "reference_model"]
