"""A grammar of command lines, derived from the signatures of the commands.

Names, types and choices of the options are those that the command line itself is built from. Only what a
value means (a model, a corpus, an output) is written here, by the name of the option.
"""

from __future__ import annotations

import inspect
import json
import types
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro
from hypothesis import strategies as st

from fuzz_files import OPERATORS, SCRIPT, VALUES
from fuzz_world import SMALL
from qkflow.cli.main import COMMANDS, TOP_LEVEL_FLAGS, load_command

MODELS = ["run", "run-bpe", "run/model", "partial", "exported", "llama", "sharded", "adapter"]
CORPORA = ["text.jsonl", "text.txt", "table.csv#text", "text.parquet", "text.txt.gz", "texts", "loops"]
CORPORA += ["patterns:documents=8,words=20", "loops/**/*.txt"]
STUDIES = ["study", "finished", "pace", "record.json"]
VARIANTS = ["standard", "euler", "euler{step=0,1}", "leapfrog:n=2", "affine+differential", "drift@gpt2"]
# Valid values by the name of an option; an option of another name has those of its type.
PLACES: dict[str, list[str]] = {
    "model": MODELS,
    "model2": MODELS,
    "source": MODELS,
    "base": ["llama", "exported"],
    "coupling": ["none", "euler", "adapter", "leapfrog:n=2"],
    "folder": ["new", "run", "partial", "study", "pace"],
    "studies": STUDIES,
    "pilot": STUDIES,
    "reuse": ["record.json"],
    "data": CORPORA,
    "corpus": CORPORA,
    "tokenizer": ["bytes", "bpe:300", "tokenizer.json", "exported"],
    "study": ["recipe.yaml", "grid.yaml", "coupling", "fast-slow"],
    "config": ["run.yaml", "recipe.yaml"],
    "section": ["model", "train"],
    "task": ["agreement", "hatexplain", "squad", "sst-2"],
    "dial": ["coupling", "init"],
    "results": ["results"],
    "optimizer": ["adamw", "muon", "sgd"],
    "match": ["tokens", "time", "flops", "params"],
    "engine": ["local", "slurm", "ray"],
    "address": ["127.0.0.1:1"],
    "slurm_options": ["--time=1:00:00"],
    "parallel": ["ddp", "fsdp"],
    "generator": ["rates.csv", "rates.json", "rates.npy"],
    "saved": ["calibration.json"],
    "save": ["out/ablation.json"],
    "variants": VARIANTS,
    "baselines": VARIANTS,
    "controls": [*VARIANTS, "none"],
    "inits": ["gpt2", "fan_in,modern", "gpt2{qk=zero}", "modern+symmetric=1"],
    "init": ["gpt2", "fan_in", "gpt2{qk=zero}"],
    "scoring": ["softmax", "differential"],
    "preset": ["tiny"],
    "schedule": ["cosine", "wsd", "constant"],
    "precision": ["fp32"],
    "device": ["auto", "cpu"],
    "tokens": ["64", "1k", "4096"],
    "tune_tokens": ["4k"],
    "seeds": ["3", "auto", "1"],
    "ratios": ["1,10", "1,increasing:40"],
    "pace": ["1", "4", "increasing:2"],
    "set": ["train.clip=0.5", "model.n_kv_heads=1", "model.attention.qk_norm=true", "train.pace=2"],
    "split": ["train", "validation", "all"],
    "tasks": ["tiny_choice"],
    "include": ["tasks"],
    "text": ["To be", "a b " * 2000],
    "prompt": ["To be", ""],
    "kind": ["CACO", "all"],
    "setting": ["FACO"],
    "qk_init": ["identity"],
    "ov_init": ["uniform"],
    "finetune": ["glue:sst-2", "none"],
    "finetune_data": ["tasks"],
    "stages": ["main", "short"],
    "scale": ["tiny", "paper"],
    "hardware": ["h100", "cpu"],
    "qk": ["q,k", "q,k,qk"],
    "lr_factors": ["0.5,1"],
    "out": ["out", "out/page.html", "page.png", "run"],
    "record": ["out/record.json"],
    "cache": ["cache", "other-cache"],
}
_STUDY = "--variants euler --controls none --inits gpt2 --seq-len 8 --batch-size 1"
HOSTILE_TEXTS = [
    *("", " ", "-", "--", "x", "\udcff\udcfe", "🦉", "é" * 200, "x" * 5000, "\x1b[31m", "a\nb", "[/bold]"),
    *("{}", "%s", "..", "../..", "~", "~no-such-user/x", "/", "/dev/zero", "/dev/null", "/dev/stdin", "pipe"),
    *("text.txt/x", "nan", "inf", "-inf", "1e999", "²", "٣", "0x10", "1_0", "9" * 5000, "-1", "0", "1e30"),
    *(
        "None",
        "null",
        "true",
        "hf:",
        "hf:x",
        "hf:a/b/c",
        "hf:../x",
        "hf:a b",
        "hf:" + "x" * 300,
        "a/b",
        "a/b/c",
    ),
    *("@", "a@b", "#", "bpe:", "bpe:²", "bpe:0", "bpe:99999999999", "bpe:-1", "patterns:", "patterns:x"),
    *(
        "patterns:documents=1000000000",
        "patterns:words=99999999999",
        "patterns:repeat=nan",
        "patterns:seed=²",
    ),
    *("euler:step=nan", "euler:hidden_dim=99999999999", "leapfrog:n=99999999999", "leapfrog:n=-1"),
    *("increasing:nan", "increasing:", "euler{", "euler{step=}", "standard{train.lr=[[[[}", "a=b=c", "a.b="),
    *("standard{model.dim=99999999999}", "train.lr=nan", "train.seed=1e400", "model.rope={a: 1}", "x.y.z=1"),
    *(
        "model.dim=1000000",
        "train." + "a." * 5000 + "x=1",
        "model.dim=" + "[" * 3000,
        "train.pace={}",
        "train.steps=2024-13-45",
        "model.slow={ratio: 0}",
        ".=1",
    ),
    *("model.slow={ratio: 99999999999}", "model.attention={window: -1}", "model.slow.inject=[99]", SCRIPT),
    *("data.corpus=..", "train.freeze=[x]", "glue:", "glue:x", "squad", "cuda:x", "cpu:99999999999", "meta"),
    *("*", "[", "**/*", "nowhere/*.txt", "text.jsonl#", "table.csv#²", "table.csv#" + "9" * 5000),
]
INTS = ["1", "2", "3", "0", "-1", "99999999999", "9223372036854775807", "9" * 23, "2.5", "x", ""]
FLOATS = ["1", "0.5", "2", "0", "-1", "nan", "inf", "1e300", "1e-300", "9" * 400, "x", ""]
HOSTILE_ENVIRONMENT = {
    "WORLD_SIZE": ["0", "-1", "x", "", "99999999999", "2"],
    "RANK": ["-1", "x", "7"],
    "LOCAL_RANK": ["x", "-1"],
    "LOCAL_WORLD_SIZE": ["x", "0"],
    "HOME": ["", "/nowhere", "\udcff", "/dev/null"],
    "QKFLOW_CACHE": ["", "/dev/null", "text.txt", "/dev/null/x", "~no-such-user", "\udcff", "x" * 300],
    "HF_ENDPOINT": [
        "",
        "x",
        "http://",
        "http://[",
        "http://127.0.0.1:x",
        "http://127.0.0.1:9",
        "ftp://127.0.0.1",
    ],
    "COLUMNS": ["0", "1", "x", "40"],
    "OMP_NUM_THREADS": ["x", "0"],
    "NO_COLOR": ["1"],
    "TERM": ["dumb", ""],
}
# What keeps a legal command short; options that are drawn come later and replace these.
CHEAP: dict[str, str] = {
    "train": f"{' '.join(SMALL)} --data text.jsonl --tokenizer bytes --steps 1",
    "compare": f"--dry-run --data text.jsonl --tokens 4k --out out {_STUDY}",
    "generate": "--tokens 2 --threads 1",
    "eval": "--threads 1 --data text.jsonl --tokens 64",
    "probe": "--text To --threads 1",
    "explore": "--no-browser --threads 1",
    "watch": "--no-browser",
    "bench": "--level attention --variants euler --dim 8 --n-heads 2 --seq-len 4 --batch-size 1 --rounds 2",
    "calibrate": "--studies 100 --seeds 3",
    "data describe": "--tokenizer bytes",
    "data prepare": "--tokenizer bytes",
    "data verify": "--tokenizer bytes",
    "pace synthetic": "--setting FACO --steps 1 --seeds 1 --workers 1",
    "pace study": "--steps 1 --examples 32 --test 12 --n-layers 1 --dim 16 --n-heads 2 --seeds 1 "
    "--ratios 1,10 --jobs 1 --out pace",
    "timescale theory": "--quick --steps 1 --hidden-dim 2",
    "reproduce": "--plan",
    "plan": f"--tokens 1k {_STUDY}",
    "plan scaling": f"--tokens 1k {_STUDY}",
}
# How often a command is drawn: those that compute for long even if they are small less often, those that
# read the files of others more often.
WEIGHTS = {
    "timescale theory": 1,
    "claims": 3,
    "calibrate": 1,
    "bench": 2,
    "pace synthetic": 2,
    "pace study": 5,
    "plan": 3,
    "plan scaling": 3,
    "reproduce": 10,
    "compare": 10,
    "report": 150,
    "train": 100,
    "generate": 80,
    "watch": 100,
    "explore": 60,
    "eval": 60,
    "probe": 40,
    "import": 60,
    "export": 40,
}
DEFAULT_WEIGHT = 30
SLOW = {"timescale theory", "calibrate", "bench", "plan", "plan scaling", "reproduce", "compare", "claims"}
SLOW |= {"pace study", "pace synthetic"}
FINISHED = ["--data", "text.jsonl", "--tokenizer", "bytes", "--variants", "euler", "--controls", "none"]
FINISHED += ["--tokens", "128", "--seq-len", "16", "--batch-size", "4", "--seeds", "3", "--out", "finished"]
FINISHED += ["--inits", "gpt2"]
FINISHED += ["--finetune", "glue:sst-2", "--finetune-data", "tasks", "--finetune-epochs", "1"]
CLAIMS = ["--results", "results"]
# Commands that read files, with the files they are given: an item of the world, or a name of PLACES. An item
# after @ is damaged, but not an argument.
READERS: list[tuple[str, list[str]]] = [
    *[
        ("report", [item])
        for item in ("study", "study", "study", "finished", "pace", "pace", "record.json", "record.json")
    ],
    *[("watch", [item]) for item in ("study", "finished", "pace")],
    *[("compare", [*FINISHED, "@finished"]), ("compare", [*FINISHED, "--reuse", "record.json"])],
    *[("pace study", ["agreement", "@pace"]), ("pace study", ["task", "--data", "tasks"])],
    *[("eval", ["exported", "--tasks", "tiny_choice", "--include", "tasks"]), ("claims", CLAIMS)],
    *[(name, ["text.jsonl", "@cache"]) for name in ("data prepare", "data verify", "data describe")],
    *[("train", ["new", "@cache"]), ("eval", ["run", "@cache"])],
    *[("train", [item]) for item in ("run", "partial", "partial")],
    *[("train", ["new", flag, item]) for flag, item in (("--config", "run.yaml"), ("--data", "data"))],
    *[(name, ["model"]) for name in ("generate", "eval", "probe", "explore")],
    *[("import", [item, "new"]) for item in ("exported", "llama")],
    *[("explore", ["adapter", "--base", "llama"]), ("export", ["run-bpe", "new"])],
    *[("data prepare", ["text.parquet"])] * 3,
    *[("data prepare", ["corpus"]), ("data prepare", ["text.txt", "--tokenizer", "tokenizer.json"])],
    *[("reproduce", ["recipe.yaml"]), ("calibrate", ["--saved", "calibration.json"])],
    *[("timescale theory", ["--generator", "generator"])],
]


@dataclass(frozen=True)
class Option:
    """One option of a command, as its signature has it."""

    name: str
    kind: Any  # int, float, bool, str or Path
    choices: tuple[str, ...] = ()
    is_positional: bool = False
    is_required: bool = False
    is_list: bool = False
    default: Any = None

    @property
    def flag(self) -> str:
        name = self.name.replace("_", "-")
        return f"--no-{name}" if self.kind is bool and self.default is True else f"--{name}"


@dataclass(frozen=True)
class Case:
    """One invocation: arguments, damaged files and environment variables."""

    argv: list[str]
    mutations: list[tuple[str, str, int]] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)


@cache
def command_options(command: str) -> tuple[Option, ...]:
    """Return the options of a command from its signature."""
    function = load_command(command)
    hints = get_type_hints(function, include_extras=True)
    return tuple(
        _option(parameter, hints[name]) for name, parameter in inspect.signature(function).parameters.items()
    )


def _option(parameter: inspect.Parameter, hint: Any) -> Option:
    positional = parameter.kind is parameter.POSITIONAL_ONLY
    while get_origin(hint) is Annotated:
        positional = positional or tyro.conf.Positional in get_args(hint)
        hint = get_args(hint)[0]
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(kind for kind in get_args(hint) if kind is not type(None))
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    is_list = get_origin(hint) is tuple
    hint = get_args(hint)[0] if is_list else hint
    choices = tuple(map(str, get_args(hint))) if get_origin(hint) is Literal else ()
    required = parameter.default is parameter.empty
    kind = str if choices else hint
    return Option(parameter.name, kind, choices, positional, required, is_list, parameter.default)


def _values(option: Option) -> st.SearchStrategy[str]:
    if option.kind is int:
        return st.sampled_from(INTS)
    if option.kind is float:
        return st.sampled_from(FLOATS)
    if option.name == "set":
        valued = st.tuples(st.sampled_from(_config_keys()), st.sampled_from(VALUES))
        assignments = valued.map(lambda drawn: f"{drawn[0]}={json.dumps(drawn[1])[:1000]}")
        return st.one_of(
            st.sampled_from(PLACES["set"]), st.sampled_from(HOSTILE_TEXTS), assignments, assignments
        )
    valid = list(option.choices) or PLACES.get(option.name, ["out"] if option.kind is Path else ["x"])
    return st.one_of(
        st.sampled_from(valid),
        st.sampled_from(valid),
        st.sampled_from(HOSTILE_TEXTS),
        st.sampled_from(HOSTILE_TEXTS + INTS),
    )


@cache
def _config_keys() -> list[str]:
    """Return every key of a run's config."""
    from qkflow.cli.commands.registry import config_rows

    return [str(row["key"]) for row in config_rows()]


def cases(files: dict[str, list[str]], *, quick: bool = False) -> st.SearchStrategy[Case]:
    """Return invocations: valid ones on damaged files, and hostile ones.

    files    the files of every item of the world
    quick    leave out the commands that compute for seconds
    """
    drawn = st.one_of(file_cases(files), argument_cases())
    return drawn.filter(lambda case: not _is_slow(case)) if quick else drawn


def _is_slow(case: Case) -> bool:
    names = {case.argv[0], " ".join(case.argv[:2])}
    return not names.isdisjoint(SLOW) or "--tasks" in case.argv


@st.composite
def file_cases(draw: st.DrawFn, files: dict[str, list[str]]) -> Case:
    """Draw a valid command whose files are damaged."""
    name, items = draw(st.sampled_from(READERS))
    argv, mutations = [*name.split(" ")], []
    for item in items:
        word = draw(st.sampled_from(PLACES[item])) if item in PLACES else item
        if not word.startswith("@"):
            argv.append(word)
        found = files.get(word.lstrip("@").partition("#")[0].partition("/")[0], [])
        if found and word not in FINISHED:
            kinds = sorted({Path(file).name for file in found})  # a study has many files of a few kinds
            kind = draw(st.sampled_from(kinds))
            file = draw(st.sampled_from([file for file in found if Path(file).name == kind]))
            operators = ["change_value"] * 3 + sorted(OPERATORS)
            mutations.append((file, draw(st.sampled_from(operators)), draw(st.integers(0, 2**32 - 1))))
    if (name != "train" or "new" in argv) and name != "compare":  # a run and FINISHED have their own config
        argv += CHEAP.get(name, "").split()
    if draw(st.booleans()):
        argv.append("--json")
    return Case(argv, mutations)


@st.composite
def argument_cases(draw: st.DrawFn) -> Case:
    """Draw a command with any arguments and environment."""
    command = draw(st.sampled_from(_weighted_commands()))
    options = command_options(command)
    argv = [*command.split(" ")]
    for option in (option for option in options if option.is_positional):
        if option.is_required or draw(st.booleans()):
            argv += draw(st.lists(_values(option), min_size=1, max_size=2 if option.is_list else 1))
    argv += CHEAP.get(command, "").split()
    flags = [option for option in options if not option.is_positional]
    for option in draw(st.lists(st.sampled_from(flags), min_size=1, max_size=3, unique=True)):
        argv += [option.flag] if option.kind is bool else [option.flag, draw(_values(option))]
    if draw(st.integers(0, 99)) == 7:
        word = draw(st.sampled_from([*TOP_LEVEL_FLAGS, *HOSTILE_TEXTS]))
        argv.insert(draw(st.integers(0, len(argv))), word)
    environment = {}
    if draw(st.integers(0, 15)) == 7:
        variables = st.sampled_from(sorted(HOSTILE_ENVIRONMENT))
        names = draw(st.lists(variables, min_size=1, max_size=2, unique=True))
        environment = {name: draw(st.sampled_from(HOSTILE_ENVIRONMENT[name])) for name in names}
    return Case(argv, [], environment)


@cache
def _weighted_commands() -> list[str]:
    """Return the commands, each as often as it is to be drawn."""
    return [name for name in COMMANDS for _ in range(WEIGHTS.get(name, DEFAULT_WEIGHT))]
