"""Parameter roles, declared by the module that owns a parameter.

A module declares `roles = {"name": "role"}` for its own parameters or for whole children; the declaration
closest to the parameter wins. A module may declare `claims` instead, which overrides the `roles` of its
children. Roles are declared on modules, not tensors: `deepcopy` and sharding replace parameter objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from torch import nn

from qkflow.errors import InputError, join_limited, unknown

ROLES = (
    "q",  # query projection
    "k",  # key projection
    "qk",  # collapsed query-key matrix
    "v",  # value projection
    "o",  # output projection
    "ov",  # collapsed output-value matrix
    "qk_norm",  # norms of queries and keys
    "coupling",
    "scoring",
    "slow",
    "gate",
    "mlp",
    "embed",
    "norm",
    "head",  # an output layer that is not tied to the embedding
)
QK_ROLES = ("q", "k", "qk")  # the query-key circuit


def parameter_roles(model: nn.Module, *, use_claims: bool = True) -> dict[str, str]:
    """Return the role of every parameter by full name. Raise InputError if one has none.

    `use_claims=False`: a claim counts only for a parameter without any other role.
    """
    roles = {name: _find_role(model, name, use_claims) for name, _ in model.named_parameters()}
    missing = [name for name, role in roles.items() if role is None]
    if missing:
        raise InputError(
            f"no role is declared for {join_limited(missing, 8)}: "
            "add it to the `roles` of the module that owns it, or pass a mapping",
            code="missing-role",
        )
    return {name: role for name, role in roles.items() if role is not None}


def has_roles(model: nn.Module) -> bool:
    """Return whether every parameter of `model` has a role, as in all models of this package."""
    return all(_find_role(model, name) is not None for name, _ in model.named_parameters())


def freeze_roles(model: nn.Module, roles: Iterable[str]) -> None:
    """Set `requires_grad` to False for all parameters of these roles."""
    by_name = parameter_roles(model)
    for role in roles:
        if role not in by_name.values():
            raise unknown("role to freeze in this model", role, set(by_name.values()), code="unknown-role")
        for name, parameter in model.named_parameters():
            if by_name[name] == role:
                parameter.requires_grad_(False)


def _find_role(model: nn.Module, name: str, use_claims: bool = True) -> str | None:
    owners = list(_module_chain(model, name))
    claims = ((owner, rest, "claims") for owner, rest in owners)
    roles = ((owner, rest, "roles") for owner, rest in reversed(owners))
    for owner, rest, kind in chain(claims, roles) if use_claims else chain(roles, claims):
        declared: dict[str, str] = getattr(owner, kind, None) or {}
        for depth in range(len(rest), 0, -1):
            role = declared.get(".".join(rest[:depth]))
            if role is not None:
                return role
    return None


def _module_chain(model: nn.Module, name: str) -> Iterator[tuple[nn.Module, list[str]]]:
    """Yield the modules from the root to the owner of a parameter, each with the remaining name parts."""
    parts = name.split(".")
    module = model
    for depth, part in enumerate(parts):
        yield module, parts[depth:]
        if depth < len(parts) - 1:
            module = module.get_submodule(part)
