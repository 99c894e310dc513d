"""Models on disk: opened whatever they are, and written in the form that is asked for."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from qkflow import files
from qkflow.data.readers.hf_datasets import check_hub_reachable
from qkflow.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from qkflow.errors import InputError
from qkflow.hf.adapter_io import PICKLE_SUFFIXES, load_adapter
from qkflow.hf.convert import from_transformers, to_llama, to_transformers
from qkflow.hf.model_card import create_model_card
from qkflow.hf.modeling import QKFlowPreTrainedModel

ExportFormat = Literal["qkflow", "llama"]
# errors that say in words what is wrong; of others the name helps
SELF_EXPLANATORY_ERRORS = (
    OSError,
    ValueError,
    RuntimeError,
    ImportError,
    SafetensorError,
    StrictDataclassError,
)
NO_PICKLES_HINT = (
    "pickles are never opened, so load it where you trust it and write it again with save_pretrained, "
    "which makes a safetensors file"
)


def load_model_and_tokenizer(
    source: str | Path, *, coupling: str | Path | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A causal model and its tokenizer: a run of ours, or a folder or hub name of `transformers`.

    `coupling` is a folder that `hf.save_adapter` wrote, to be attached. Code that comes with a model is never run.
    """
    if is_run_dir(Path(source)):
        training = _import_pretrained()
        decoder, tokenizer = training.load_model(source)
        model = to_transformers(decoder, **training.transformers_config(source))
        words = to_fast_tokenizer(tokenizer)
    else:
        model, words = _load_transformers(str(source))
    if coupling is not None:
        load_adapter(model, coupling)
    return model.eval(), words


def export_model(source: str | Path, out: str | Path, *, to: ExportFormat = "qkflow") -> PreTrainedModel:
    """Write a run of ours as a `transformers` folder with weights, tokenizer and model card."""
    training = _import_pretrained()
    decoder, tokenizer = training.load_model(source)
    convert = {"qkflow": to_transformers, "llama": to_llama}
    if to not in convert:
        raise InputError(f"a model is exported to 'qkflow' or 'llama', not '{to}'")
    model = convert[to](decoder, **training.transformers_config(source))
    with _atomic_folder(Path(out)) as folder:
        model.save_pretrained(folder)
        to_fast_tokenizer(tokenizer).save_pretrained(folder)
        files.write_atomic(
            folder / "README.md", create_model_card(decoder.config, model.num_parameters(), to)
        )
    return model


def import_model(source: str | Path, out: str | Path) -> nn.Module:
    """Write a `transformers` model (of our architecture, or a Llama) as a folder that `qkflow` reads."""
    model, words = _load_transformers(str(source))
    decoder = from_transformers(model)
    tokenizer = _from_fast_tokenizer(words)
    if tokenizer.vocab_size > decoder.config.vocab_size:
        raise InputError(
            f"the tokenizer of '{source}' knows {tokenizer.vocab_size} tokens, the model only "
            f"{decoder.config.vocab_size}: resize its embeddings, or give the tokenizer it was trained with"
        )
    ids = {name: getattr(model.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    training = _import_pretrained()
    with _atomic_folder(Path(out)) as folder:
        training.save(
            folder / "model",
            decoder.config,
            training.full_state_dict(decoder),
            tokenizer,
            length=model.config.max_position_embeddings,
            special_tokens={name: token for name, token in ids.items() if token is not None},
        )
    return decoder


def is_run_dir(path: Path) -> bool:
    """Whether a folder is a run of ours, or the `model` folder of one."""
    for config in (path / "config.json", path / "model" / "config.json"):
        if config.is_file():
            try:
                written = json.loads(config.read_text())
            except ValueError:
                return False
            return isinstance(written, dict) and "format" in written
    return False


def to_fast_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Our tokenizer as one of `transformers`."""
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers import decoders, models, pre_tokenizers

    if isinstance(tokenizer, HuggingFaceTokenizer):
        rust = RustTokenizer.from_str(tokenizer.to_str())
        end = rust.id_to_token(tokenizer.eos_token_id)
        if tokenizer.bos_token_id is None:
            rust.post_processor = None  # the model never saw what a template puts around a text
    else:  # bytes: token i is byte i, written in the letters that byte-level BPE has for bytes
        letters = bytes_to_unicode()
        rust = RustTokenizer(models.BPE({letters[byte]: byte for byte in range(256)}, []))
        rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        rust.decoder = decoders.ByteLevel()
        end = "<|endoftext|>"
        rust.add_special_tokens([end])
    start = tokenizer.bos_token_id
    first = None if start is None else rust.id_to_token(start)
    return PreTrainedTokenizerFast(tokenizer_object=rust, bos_token=first, eos_token=end, pad_token=end)


def _from_fast_tokenizer(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    if len(tokenizer) == ByteTokenizer.vocab_size and tokenizer.encode("é") == list("é".encode()):
        return ByteTokenizer()
    added = tokenizer.encode("")  # what its template puts around every text
    return HuggingFaceTokenizer(tokenizer.backend_tokenizer, tokenizer.eos_token, added[0] if added else None)


def _check_source_exists(source: str) -> None:
    """Say at once what is not there: the hub's own client would look for it for half a minute."""
    if Path(source).is_dir():
        return
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", source):
        raise InputError(f"there is no model at {source}: give the folder of one")
    if not isinstance(try_to_load_from_cache(source, "config.json"), str):
        check_hub_reachable(f"'{source}', which is no folder here,", "the path of its folder")


def _load_transformers(source: str) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    _check_source_exists(source)
    _check_no_pickles(Path(source))
    with _silence_load_report():
        model, found = _from_pretrained(
            AutoModelForCausalLM,
            source,
            "as a causal model",
            "check its files, config.json first, or save it again with save_pretrained",
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are in the account, and refused here
            output_loading_info=True,
        )
    _check_loaded_weights(source, model, found)
    _import_pretrained().check_finite_weights(f"'{source}'", model.named_parameters())
    hint = "put the tokenizer.json that it was trained with there"
    return model, _from_pretrained(AutoTokenizer, source, "for its tokenizer", hint)


def _from_pretrained(auto_class: Any, source: str, purpose: str, hint: str, **options: Any) -> Any:
    try:
        return auto_class.from_pretrained(source, trust_remote_code=False, **options)
    except Exception as error:  # it hands on whatever the files make it run into
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        more = 4 if lines and lines[0].endswith(":") else 1  # of a list, its first items
        reason = " ".join(lines[:more]).rstrip(":,.")
        if "use_safetensors" in reason:  # so it says of a name on the hub that there are none
            reason, hint = "it has no safetensors file", NO_PICKLES_HINT
        if isinstance(error, ImportError):
            hint = "install that, or give a model that does without"
        if not isinstance(error, SELF_EXPLANATORY_ERRORS):
            reason = f"{type(error).__name__}: {reason}"
        raise InputError(f"'{source}' cannot be opened {purpose} ({reason}): {hint}") from error


@contextmanager
def _silence_load_report() -> Iterator[None]:
    """What `transformers` would warn of when it loads weights is refused here, in one sentence."""
    logger = logging.getLogger("transformers.modeling_utils")

    def errors(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    logger.addFilter(errors)
    try:
        yield
    finally:
        logger.removeFilter(errors)


def _check_no_pickles(folder: Path) -> None:
    """Also those that a config or an index of safetensors points at, which `use_safetensors` lets pass."""
    if not folder.is_dir():
        return  # a name on the hub
    named: list[str] = []
    for file in (folder / "config.json", folder / "model.safetensors.index.json"):
        named += re.findall(r'"([^"]+)"', file.read_text("utf-8", "replace")) if file.is_file() else []
    if not any(folder.glob("*.safetensors")):
        named += [path.name for path in folder.iterdir()]
    pickles = sorted({name for name in named if Path(name).suffix in PICKLE_SUFFIXES})
    if pickles:
        raise InputError(f"'{folder}' keeps its weights in {_join_limited(pickles)}: {NO_PICKLES_HINT}")


def _check_loaded_weights(source: str, model: PreTrainedModel, loading_info: dict[str, Any]) -> None:
    """A model that had weights drawn at random, or left out, is not the one that was saved."""
    missing, extra = sorted(loading_info["missing_keys"]), sorted(loading_info["unexpected_keys"])
    coupled = [key for key in extra if ".coupling." in key]
    if coupled and not isinstance(model, QKFlowPreTrainedModel):
        raise InputError(
            f"'{source}' was saved with a coupling attached ({_join_limited(coupled)}): hf.save_adapter the coupling, "
            "hf.detach it before save_pretrained, and give what hf.save_adapter wrote with --coupling"
        )
    shapes = [
        f"{key}, {(*there,)} instead of {(*here,)}"
        for key, there, here in sorted(loading_info["mismatched_keys"])
    ]
    wrong = {"missing": missing, "without a place": extra, "of another shape": shapes}
    faults = "; ".join(f"{what}: {_join_limited(keys)}" for what, keys in wrong.items() if keys)
    if faults:
        raise InputError(
            f"the weights of '{source}' are not those of the {type(model).__name__} that its config.json "
            f"describes ({faults}): give the folder of a causal model as save_pretrained wrote it"
        )


def _join_limited(names: Sequence[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _import_pretrained() -> Any:
    from qkflow.training import pretrained

    return pretrained


@contextmanager
def _atomic_folder(out: Path) -> Iterator[Path]:
    """A folder that takes `out`'s place when the block ends, and leaves nothing behind when it fails."""
    if out.exists():
        raise InputError(f"'{out}' exists already: name a folder that does not")
    staging = out.with_name(f".{out.name}.part")
    shutil.rmtree(staging, ignore_errors=True)
    files.make_folder(staging)
    try:
        yield staging
        staging.rename(out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
