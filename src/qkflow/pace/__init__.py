"""How fast the query-key circuit learns, measured against the output-value circuit."""

from qkflow.pace.fused import join_fused, split_fused
from qkflow.pace.groups import param_groups, roles_of

__all__ = ["join_fused", "param_groups", "roles_of", "split_fused"]
