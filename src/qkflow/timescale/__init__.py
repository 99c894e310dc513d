"""A second, slower path beside the fast one, and the theory of its limit.

The path: `slow_path` (attention over block means, and what tokens hear of it) from `pooling` and `gate`; its
options in `config`, its state between decoded tokens in `cache`, its ablations in `variants`, what is logged
of it in `measures`.
The theory: `master_equation` solves W p = 0, `fast_slow` integrates ε·ẋ = W(y)x, `variational` fits φ_θ(y).
"""
