"""A second, slower path beside the fast one, and the theory of its limit.

`master_equation` solves W p = 0, `fast_slow` integrates ε·ẋ = W(y)x, `variational` fits φ_θ(y) to the
solution; `pooling` and `gate` are the parts of the slow path that carry no attention.
"""
