"""Load models and tokenizers from disk or the Hub; convert between run and `transformers` folders."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
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
from qkflow.config_io import check_utf8
from qkflow.data.readers.hf_datasets import check_hub_name, check_hub_reachable
from qkflow.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, backend_errors
from qkflow.errors import InputError, join_limited, unknown
from qkflow.hf.adapter_io import PICKLE_SUFFIXES, load_adapter
from qkflow.hf.convert import from_transformers, to_llama, to_transformers
from qkflow.hf.model_card import create_model_card
from qkflow.hf.modeling import QKFlowPreTrainedModel
from qkflow.plain_data import read_bytes, read_json
from qkflow.training import pretrained

ExportFormat = Literal["qkflow", "llama"]
# errors whose message is enough; of others the class name is shown, too
SELF_EXPLANATORY_ERRORS = (
    OSError,
    ValueError,
    RuntimeError,
    ImportError,
    SafetensorError,
    StrictDataclassError,
)
# transformers builds all layers, and a name for every label, before it reads weights
MAX_COUNTS = {"layer": 10_000, "label": 100_000}  # by a part of the key in config.json
NO_PICKLES_HINT = (
    "pickles are never opened; load it where you trust it and write it again with save_pretrained, which "
    "writes a safetensors file"
)


def load_model_and_tokenizer(
    source: str | Path, *, coupling: str | Path | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Load a causal language model and its tokenizer, in eval mode.

    source      the folder of a qkflow run, or a `transformers` folder or Hub name
    coupling    a folder that `hf.save_adapter` wrote, attached to the model

    Code that comes with a model is never run.
    """
    if is_run_dir(Path(source)):
        decoder, decoder_tokenizer = pretrained.load_model(source)
        model = to_transformers(decoder, **pretrained.transformers_config(source))
        tokenizer = to_fast_tokenizer(decoder_tokenizer)
    else:
        model, tokenizer = load_transformers(str(source))
    if coupling is not None:
        load_adapter(model, coupling)
    return model.eval(), tokenizer


def export_model(source: str | Path, out: str | Path, *, to: ExportFormat = "qkflow") -> PreTrainedModel:
    """Write the model of a qkflow run as a `transformers` folder: weights, config, tokenizer, model card."""
    _check_new_folder(Path(out))
    check_utf8(f"the folder {out}", str(out))  # as transformers needs it
    decoder, tokenizer = pretrained.load_model(source)
    convert = {"qkflow": to_transformers, "llama": to_llama}
    if to not in convert:
        raise unknown("export format", to, convert)
    model = convert[to](decoder, **pretrained.transformers_config(source))
    with files.staging_folder(Path(out)) as folder:
        model.save_pretrained(folder)
        to_fast_tokenizer(tokenizer).save_pretrained(folder)
        files.write_atomic(
            folder / "README.md", create_model_card(decoder.config, model.num_parameters(), to)
        )
    return model


def import_model(source: str | Path, out: str | Path) -> nn.Module:
    """Write a `transformers` model (qkflow architecture or Llama) as a folder that qkflow commands read."""
    _check_new_folder(Path(out))
    model, fast_tokenizer = load_transformers(str(source))
    decoder = from_transformers(model)
    tokenizer = from_fast_tokenizer(fast_tokenizer)
    if tokenizer.vocab_size > decoder.config.vocab_size:
        raise InputError(
            f"the tokenizer of '{source}' has {tokenizer.vocab_size} tokens, the model only "
            f"{decoder.config.vocab_size}: resize its embeddings, or give the tokenizer it was trained with",
            code="vocab-size-mismatch",
        )
    ids = {name: getattr(model.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    with files.staging_folder(Path(out)) as folder:
        pretrained.save_model(
            folder / "model",
            decoder.config,
            pretrained.full_state_dict(decoder),
            tokenizer,
            seq_len=model.config.max_position_embeddings,
            special_tokens={name: token for name, token in ids.items() if token is not None},
        )
    return decoder


def is_run_dir(path: Path) -> bool:
    """Return whether a folder is a finished qkflow run, or the `model` folder of one."""
    for config_path in (path / "config.json", path / "model" / "config.json"):
        if config_path.is_file():
            try:
                config = read_json(config_path)
            except InputError:
                return False
            return isinstance(config, dict) and "format" in config
    return False


def to_fast_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Convert a qkflow tokenizer to a fast tokenizer of `transformers`."""
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers import decoders, models, pre_tokenizers

    if isinstance(tokenizer, HuggingFaceTokenizer):
        rust = RustTokenizer.from_str(tokenizer.to_str())
        eos_token = rust.id_to_token(tokenizer.eos_token_id)
        if tokenizer.bos_token_id is None:
            rust.post_processor = None  # training texts have no template
    else:  # bytes: token i is byte i, as a byte-level BPE without merges
        byte_chars = bytes_to_unicode()
        rust = RustTokenizer(models.BPE({byte_chars[byte]: byte for byte in range(256)}, []))
        rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        rust.decoder = decoders.ByteLevel()
        eos_token = "<|endoftext|>"
        rust.add_special_tokens([eos_token])
    bos_id = tokenizer.bos_token_id
    bos_token = None if bos_id is None else rust.id_to_token(bos_id)
    return PreTrainedTokenizerFast(
        tokenizer_object=rust, bos_token=bos_token, eos_token=eos_token, pad_token=eos_token
    )


def from_fast_tokenizer(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    if len(tokenizer) == ByteTokenizer.vocab_size and tokenizer.encode("é") == list("é".encode()):
        return ByteTokenizer()
    added = tokenizer.encode("")  # the template of its post-processor
    return HuggingFaceTokenizer(tokenizer.backend_tokenizer, tokenizer.eos_token, added[0] if added else None)


def check_source_exists(source: str) -> None:
    """Raise if a folder or Hub name does not exist. The Hub client would retry for half a minute first."""
    try:
        if Path(source).is_dir():
            return
    except OSError:  # a text that is too long for a path
        pass
    try:
        check_hub_name(source)
    except InputError:
        raise InputError(
            f"there is no model at {source}: give the folder of one", code="model-not-found"
        ) from None
    if not isinstance(try_to_load_from_cache(source, "config.json"), str):
        check_hub_reachable(f"'{source}', which is no folder here,", "the path of its folder")


def load_transformers(
    source: str, auto_class: Any = AutoModelForCausalLM, purpose: str = "as a causal model"
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Load a model with one of the Auto classes, and its tokenizer. Pickled weights are refused."""
    check_source_exists(source)
    _check_no_pickles(Path(source))
    _check_config(Path(source) / "config.json")
    with _silence_load_report():
        model, loading_info = _from_pretrained(
            auto_class,
            source,
            purpose,
            "check its files, config.json first, or save it again with save_pretrained",
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # listed in loading_info and refused below
            output_loading_info=True,
        )
    _check_loaded_weights(source, model, loading_info)
    pretrained.check_finite_weights(f"'{source}'", model.named_parameters())
    hint = "add the tokenizer.json that it was trained with"
    with backend_errors(f"the tokenizer of '{source}'"):
        tokenizer = _from_pretrained(AutoTokenizer, source, "for its tokenizer", hint)
        try:
            tokenizer.encode("")  # fails with values of a tokenizer_config.json that are of the wrong type
        except Exception as error:  # transformers does not check them
            raise InputError(
                f"the tokenizer of '{source}' fails ({error}): {hint}", code="model-not-loadable"
            ) from error
    return model, tokenizer


def _from_pretrained(auto_class: Any, source: str, purpose: str, hint: str, **options: Any) -> Any:
    try:
        return auto_class.from_pretrained(source, trust_remote_code=False, **options)
    except Exception as error:  # transformers raises many classes for broken files
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        more = 4 if lines and lines[0].endswith(":") else 1  # of a list, its first items
        reason = " ".join(lines[:more]).rstrip(":,.")
        if "use_safetensors" in reason:  # a Hub repository without safetensors
            reason, hint = "it has no safetensors file", NO_PICKLES_HINT
        if isinstance(error, ImportError):
            hint = "install it, or give a model that does not need it"
        if not isinstance(error, SELF_EXPLANATORY_ERRORS):
            reason = f"{type(error).__name__}: {reason}"
        raise InputError(
            f"'{source}' cannot be loaded {purpose} ({reason}): {hint}", code="model-not-loadable"
        ) from error


@contextmanager
def _silence_load_report() -> Iterator[None]:
    """Silence warnings about missing and unexpected weights, which `_check_loaded_weights` raises for."""
    logger = logging.getLogger("transformers.modeling_utils")

    def errors(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    logger.addFilter(errors)
    try:
        yield
    finally:
        logger.removeFilter(errors)


def _check_no_pickles(folder: Path) -> None:
    """Raise if weights are pickles, also where the config or safetensors index names one."""
    if not folder.is_dir():
        return  # a Hub name
    named: list[str] = []
    for file in (folder / "config.json", folder / "model.safetensors.index.json"):
        named += re.findall(r'"([^"]+)"', read_bytes(file).decode(errors="replace")) if file.is_file() else []
    if not any(folder.glob("*.safetensors")):
        named += [path.name for path in folder.iterdir()]
    _check_weight_files(folder)
    pickles = sorted({name for name in named if Path(name).suffix in PICKLE_SUFFIXES})
    if pickles:
        raise InputError(
            f"'{folder}' has its weights in {join_limited(pickles, 2)}: {NO_PICKLES_HINT}",
            code="pickle-refused",
        )


def _check_config(path: Path) -> None:
    """Raise for more layers or labels than any model has, and for kernels, which are code of a hub.

    Raise also for an adapter of PEFT, whose base model transformers would look for on a hub.
    """
    if path.with_name("adapter_config.json").is_file():
        raise InputError(
            f"'{path.parent}' is an adapter of PEFT: merge it with merge_and_unload, and save the result",
            code="model-not-loadable",
        )
    _check_values(path, read_json(path, code="model-not-loadable") if path.is_file() else {})


def _check_values(path: Path, config: Any) -> None:
    for key, value in config.items() if isinstance(config, dict) else ():
        _check_values(path, value)  # the configs of parts
        if key.endswith("_implementation") and "/" in str(value):
            raise InputError(f"{path}: '{key}' names code of a hub: remove it", code="model-not-loadable")
        most = next((most for part, most in MAX_COUNTS.items() if part in key), None)
        if most is not None and isinstance(value, int) and value > most:
            raise InputError(
                f"{path}: '{key}' must be at most {most:,}, not {value}", code="model-not-loadable"
            )


def _check_weight_files(folder: Path) -> None:
    """Raise if the safetensors index names a file outside its folder."""
    path = folder / "model.safetensors.index.json"
    index = read_json(path, code="model-not-loadable") if path.is_file() else {}
    weight_map = index.get("weight_map", {}) if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise InputError(f"{path} has no weight_map of tensors to files", code="model-not-loadable")
    for name in weight_map.values():
        files.check_file_name(f"{path}: the file", name)


def _check_loaded_weights(source: str, model: PreTrainedModel, loading_info: dict[str, Any]) -> None:
    """Raise if weights were missing (so randomly initialized), unexpected, or of another shape."""
    missing, extra = sorted(loading_info["missing_keys"]), sorted(loading_info["unexpected_keys"])
    coupled = [key for key in extra if ".coupling." in key]
    if coupled and not isinstance(model, QKFlowPreTrainedModel):
        raise InputError(
            f"'{source}' was saved with a coupling attached ({join_limited(coupled, 2)}): save the coupling "
            "with hf.save_adapter, hf.detach it before save_pretrained, and pass its folder as --coupling",
            code="coupling-in-checkpoint",
        )
    shapes = [
        f"{key}, {(*there,)} instead of {(*here,)}"
        for key, there, here in sorted(loading_info["mismatched_keys"])
    ]
    problems = {"missing": missing, "unexpected": extra, "mismatched": shapes}
    listed = "; ".join(f"{kind}: {join_limited(keys, 2)}" for kind, keys in problems.items() if keys)
    if listed:
        raise InputError(
            f"the weights of '{source}' do not fit the {type(model).__name__} in its config.json ({listed}): "
            "give the folder of a causal language model as save_pretrained wrote it",
            code="weights-mismatch",
        )


def _check_new_folder(out: Path) -> None:
    if out.exists():
        raise InputError(f"'{out}' exists already: name a folder that does not", code="folder-exists")
