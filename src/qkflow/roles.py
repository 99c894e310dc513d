"""Every parameter has a role, given by the module that owns it.

A module declares `roles = {"name": "role"}` for its own parameters or for whole children; the
declaration nearest to the parameter wins. A module that stands for one thing as a whole `claims` its children
instead, over whatever roles they declare. Roles live on modules, not on tensors, so they survive `deepcopy`,
sharding and every other way a parameter object gets replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from torch import nn

from qkflow.errors import InputError, unknown

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


def parameter_roles(model: nn.Module) -> dict[str, str]:
    """Role of every parameter by its full name; a parameter without one is an error."""
    found = {name: _find_role(model, name) for name, _ in model.named_parameters()}
    missing = [name for name, role in found.items() if role is None]
    if missing:
        raise InputError(
            f"no role is declared for {', '.join(missing)}: "
            "add it to the `roles` of the module that owns it, or pass a mapping"
        )
    return {name: role for name, role in found.items() if role is not None}


def has_roles(model: nn.Module) -> bool:
    """Whether every parameter of `model` has a role, as in every model of ours."""
    return all(_find_role(model, name) is not None for name, _ in model.named_parameters())


def freeze_roles(model: nn.Module, roles: Iterable[str]) -> None:
    """Stop the parameters of these roles from learning."""
    found = parameter_roles(model)
    for role in roles:
        if role not in found.values():
            raise unknown("role to freeze in this model", role, set(found.values()))
        for name, parameter in model.named_parameters():
            if found[name] == role:
                parameter.requires_grad_(False)


def _find_role(model: nn.Module, name: str) -> str | None:
    owners = list(_module_chain(model, name))
    claims = ((owner, rest, "claims") for owner, rest in owners)
    roles = ((owner, rest, "roles") for owner, rest in reversed(owners))
    for owner, rest, kind in chain(claims, roles):
        declared: dict[str, str] = getattr(owner, kind, None) or {}
        for depth in range(len(rest), 0, -1):
            role = declared.get(".".join(rest[:depth]))
            if role is not None:
                return role
    return None


def _module_chain(model: nn.Module, name: str) -> Iterator[tuple[nn.Module, list[str]]]:
    """The modules on the way down to a parameter, each with the rest of the way."""
    parts = name.split(".")
    module = model
    for depth, part in enumerate(parts):
        yield module, parts[depth:]
        if depth < len(parts) - 1:
            module = module.get_submodule(part)
