"""Completion of commands and options in bash, zsh and fish: `qkflow --print-completion SHELL`.

The script is complete in itself. Completing a word starts no Python process, which would import torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_args, get_type_hints

import tyro

SHELLS = ("bash", "zsh", "fish")

_BASH = """\
# Completion of qkflow in bash. Save as ~/.local/share/bash-completion/completions/qkflow, or source it.
_qkflow() {
    local current="${COMP_WORDS[COMP_CWORD]}" name="" word candidates=""
    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        case "$name:$word" in
            *:-*) ;;
            :*) name="$word" ;;
            @GROUPS@) name="$name $word" ;;
            *) break ;;
        esac
    done
    case "$name" in
@CASES@
    esac
    COMPREPLY=()
    if [[ $current == -* || $name == "" || " @GROUP_NAMES@ " == *" $name "* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$candidates" -- "$current")
    fi
}
complete -o default -F _qkflow qkflow
"""

_ZSH = """\
#compdef qkflow
# Completion of qkflow in zsh. Save as _qkflow in a folder of $fpath.
_qkflow() {
    local name="" word candidates=""
    for word in "${(@)words[2,CURRENT-1]}"; do
        case "$name:$word" in
            *:-*) ;;
            :*) name="$word" ;;
            @GROUPS@) name="$name $word" ;;
            *) break ;;
        esac
    done
    case "$name" in
@CASES@
    esac
    if [[ $PREFIX == -* || $name == "" || " @GROUP_NAMES@ " == *" $name "* ]]; then
        compadd -- ${=candidates}
    else
        _files
    fi
}
if [[ $funcstack[1] == _qkflow ]]; then
    _qkflow "$@"
else
    compdef _qkflow qkflow
fi
"""

_FISH = """\
# Completion of qkflow in fish. Save as ~/.config/fish/completions/qkflow.fish, or source it.
function __qkflow_command
    set -l words
    for word in (commandline -opc)[2..-1]
        string match -q -- '-*' $word; or set -a words $word
    end
    if contains -- "$words[1]" @GROUP_NAMES@
        string trim -- "$words[1] $words[2]"
    else
        echo "$words[1]"
    end
end
"""


def completion_script(
    shell: str, help_lines: Mapping[str, str], flags: Mapping[str, list[str]], top_level: list[str]
) -> str:
    """Return the script for one of SHELLS.

    help_lines  one line of help of every command
    flags       the options of every command
    top_level   options without a command
    """
    groups = sorted({name.partition(" ")[0] for name in help_lines if " " in name})
    if shell == "fish":
        return _fish_script(help_lines, flags, groups, top_level)
    first_words = list(dict.fromkeys(name.partition(" ")[0] for name in help_lines))
    cases = {"": first_words + top_level}
    for group in groups:
        cases[group] = [name.partition(" ")[2] for name in help_lines if name.startswith(f"{group} ")]
    template = _BASH if shell == "bash" else _ZSH
    lines = [
        f'        "{name}") candidates="{" ".join(words)}" ;;' for name, words in {**cases, **flags}.items()
    ]
    return (
        template.replace("@CASES@", "\n".join(lines))
        .replace("@GROUPS@", "|".join(f"{group}:*" for group in groups))
        .replace("@GROUP_NAMES@", " ".join(groups))
    )


def command_flags(command: Callable[..., Any]) -> list[str]:
    """Return the options of a command as they are typed."""
    hints = get_type_hints(command, include_extras=True)
    flags = [
        ("--no-" if parameter.default is True else "--") + name.replace("_", "-")
        for name, parameter in inspect.signature(command).parameters.items()
        if parameter.kind is not parameter.POSITIONAL_ONLY
        and tyro.conf.Positional not in get_args(hints[name])
    ]
    return [*flags, "--no-color", "--help"]


def _fish_script(
    help_lines: Mapping[str, str], flags: Mapping[str, list[str]], groups: list[str], top_level: list[str]
) -> str:
    lines = [_FISH.replace("@GROUP_NAMES@", " ".join(groups)).rstrip()]
    lines += [_fish_word("", group, f"commands of {group}") for group in groups]
    for name, text in help_lines.items():
        first, _, second = name.partition(" ")
        lines.append(_fish_word(first, second, text) if second else _fish_word("", first, text))
        lines += [_fish_flag(name, flag) for flag in flags[name]]
    lines += [_fish_flag("", flag) for flag in top_level]
    return "\n".join([*lines, ""])


def _fish_word(name: str, word: str, description: str) -> str:
    quoted = description.replace("'", r"\'")
    return f"{_fish_condition(name)} -f -a {word} -d '{quoted}'"


def _fish_flag(name: str, flag: str) -> str:
    return f"{_fish_condition(name)} -l {flag.removeprefix('--')}"


def _fish_condition(name: str) -> str:
    return f"""complete -c qkflow -n 'test "$(__qkflow_command)" = "{name}"'"""
