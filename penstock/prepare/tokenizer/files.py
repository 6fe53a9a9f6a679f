"""Reads a tokenizer's files from a folder, from a `tokenizer.json`, or from the Hub by name.

Special tokens and chat templates are resolved as transformers resolves them. Only the bytes count: the tokenizer's name
never enters a key. Penstock uses `tokenizer.json`, completed as transformers completes it by the added tokens that only
`tokenizer_config.json` declares. Tokenizer classes that rebuild the tokenizer are handled in `auto`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from penstock.addresses import local_path
from penstock.errors import TemplateError, TokenizerError
from penstock.prepare.tokenizer.limits import check_content
from penstock.transient import retry_transient

VOCABULARY_FILES = (
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
)
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
HUB_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "generation_config.json",
    "config.json",
)


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The contents of a tokenizer's files."""

    name: str
    tokenizer_json: bytes
    special_tokens: Mapping[str, str]
    templates: Mapping[str, str]
    warnings: tuple[str, ...] = ()
    folder: Path | None = None  # what AutoTokenizer would load; None if the file is not named tokenizer.json
    is_object: bool = False  # from an object of transformers, whose ids it gives
    end_ids: tuple[int, ...] = ()  # the model's eos_token_id, from generation_config.json or config.json

    def template(self, choice: str | None = None) -> dict[str, str]:
        """The templates to render with: `default` and, if the tokenizer has one, `tool_use`.

        `choice` is the name of one of the tokenizer's templates, or a file.
        """
        if choice is None:
            if not self.templates:
                raise TemplateError(
                    f"the tokenizer {self.name!r} has no chat template. Give one with --template FILE.jinja."
                )
            if "default" not in self.templates:
                raise TemplateError(
                    f"the tokenizer {self.name!r} has several chat templates and no default: "
                    f"{', '.join(sorted(self.templates))}. Choose one with --template NAME."
                )
            return {name: text for name, text in self.templates.items() if name in ("default", "tool_use")}
        if choice in self.templates:
            return {"default": self.templates[choice]}
        path = local_path(choice, "--template")
        try:
            return {"default": path.read_text(encoding="utf-8")}
        except UnicodeDecodeError as error:
            raise TemplateError(f"{path}: the template is not UTF-8 text (byte {error.start})") from error
        except OSError as error:
            names = ", ".join(sorted(self.templates)) or "none"
            raise TemplateError(f"--template {choice}: no such file; the tokenizer's own templates: {names}") from error


def load_tokenizer(
    spec: str | os.PathLike[str], *, revision: str | None = None, for_auto: bool = False
) -> TokenizerFiles:
    """Read a tokenizer's files; `spec` is a folder, a tokenizer.json, or a Hub name.

    With `for_auto`, a folder may lack tokenizer.json if AutoTokenizer can convert its vocabulary; `tokenizer_json` is
    then empty.
    """
    try:
        return _load(spec, revision, for_auto)
    except OSError as error:
        where = error.filename or spec
        raise TokenizerError(
            f"{where}: the tokenizer can't be read: {error.strerror}. Check its permissions, then run again."
        ) from error


@retry_transient
def _load(spec: str | os.PathLike[str], revision: str | None, for_auto: bool) -> TokenizerFiles:
    path = local_path(spec, "--tokenizer")
    if path.is_file():
        folder = path.parent
        tokenizer = path
    else:
        folder = path if path.is_dir() else _from_hub(str(spec), revision)
        tokenizer = folder / "tokenizer.json"
    convertible = for_auto and any((folder / name).is_file() for name in VOCABULARY_FILES)
    if not tokenizer.is_file() and not convertible:
        raise TokenizerError(_no_tokenizer_json(folder, str(spec)))
    config = _read_object(folder / "tokenizer_config.json")
    tokens = _special_tokens(_read_object(folder / "special_tokens_map.json"), config)
    try:
        data, notes = _completed(tokenizer.read_bytes(), config, tokens) if tokenizer.is_file() else (b"", [])
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise TokenizerError(f"{tokenizer}: not a valid tokenizer.json ({error!s:.200})") from error
    loadable = folder if tokenizer.name == "tokenizer.json" else None
    templates = _templates(folder, config)
    return TokenizerFiles(str(spec), data, tokens, templates, tuple(notes), loadable, end_ids=_end_ids(folder))


def tokenizer_of_object(tokenizer: Any) -> TokenizerFiles:
    """The same from a tokenizer object of transformers (its backend, special tokens and templates) or of tokenizers."""
    name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(backend, "to_str"):
        raise TokenizerError(
            f"a {type(tokenizer).__name__} has no fast backend to take ids from. Give a fast tokenizer of transformers "
            "(AutoTokenizer.from_pretrained), or the path or name of one."
        )
    values = orjson.loads(backend.to_str())
    values |= {"truncation": None, "padding": None}  # settings of one call, not of the tokenizer
    special = getattr(tokenizer, "special_tokens_map", {})
    tokens = {key: str(special[key]) for key in NAMED_TOKENS if isinstance(special.get(key), str)}
    given = getattr(tokenizer, "chat_template", None)
    templates = {"default": given} if isinstance(given, str) else dict(given or {})
    end = getattr(tokenizer, "eos_token_id", None)
    return TokenizerFiles(
        name, orjson.dumps(values), tokens, templates, is_object=True, end_ids=() if end is None else (end,)
    )


def _end_ids(folder: Path) -> tuple[int, ...]:
    """The model's end-of-sequence ids; some models have several."""
    for name in ("generation_config.json", "config.json"):
        given = _read_object(folder / name).get("eos_token_id")
        ids = given if isinstance(given, list) else [given]
        if all(type(number) is int for number in ids):
            return tuple(ids)
    return ()


def _from_hub(name: str, revision: str | None) -> Path:
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise TokenizerError(f"no tokenizer at {name!r}: the folder does not exist")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(HUB_FILES)))
    except Exception as error:
        raise TokenizerError(
            f"no folder {name!r}, and no tokenizer of that name could be loaded from the Hub: {error}. "
            "Check the name, or pass the path of a folder with tokenizer.json."
        ) from error


def _no_tokenizer_json(folder: Path, spec: str) -> str:
    present = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    shown = ", ".join(present[:12]) or "nothing"
    return f"{spec}: no tokenizer.json (found: {shown}). {_how_to_convert(present)}"


def _how_to_convert(present: Sequence[str]) -> str:
    if "tekken.json" in present:
        return (
            "tekken.json is Mistral's own format; most of these models have a repository with a converted "
            "tokenizer.json (mistral-community on the hub). Check its ids against mistral-common's before you train."
        )
    if any(name.endswith(".tiktoken") or name == "tiktoken.model" for name in present):
        return (
            "A tiktoken file lacks the split pattern and the special tokens, which are in the model's own code. Build "
            "its tiktoken.Encoding with that code, then convert it: "
            "transformers.integrations.tiktoken.convert_tiktoken_to_fast(encoding, FOLDER)."
        )
    if any(name in VOCABULARY_FILES for name in present):
        return "Use --tokenizer-as auto to let transformers convert it; ids are then those of AutoTokenizer."
    return (
        "Penstock supports only this format; save one with AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER)."
    )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = orjson.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return {}
    except orjson.JSONDecodeError as error:
        raise TokenizerError(f"{path}: invalid JSON ({error})") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: expected a JSON object")
    return value


def _special_tokens(*layers: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for layer in layers:  # tokenizer_config.json wins over special_tokens_map.json, as in transformers
        for key in NAMED_TOKENS:
            value = layer.get(key)
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                check_content(content, f"the {key}")
                tokens[key] = content
    return {key: tokens[key] for key in NAMED_TOKENS if key in tokens}


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    templates: dict[str, str] = {}
    single = folder / "chat_template.jinja"
    if single.is_file():
        templates["default"] = single.read_text(encoding="utf-8")
    for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[extra.stem] = extra.read_text(encoding="utf-8")
    if templates:  # files win over tokenizer_config.json, as in transformers
        return templates
    given = config.get("chat_template")
    if isinstance(given, str):
        return {"default": given}
    if isinstance(given, list):
        return {str(entry["name"]): str(entry["template"]) for entry in given}
    return {}


def _completed(data: bytes, config: Mapping[str, Any], tokens: Mapping[str, str]) -> tuple[bytes, list[str]]:
    """Add the tokens that only tokenizer_config.json declares, as transformers does; returns warnings too."""
    declared = config.get("added_tokens_decoder")
    entries = [e for _, e in sorted(declared.items(), key=lambda e: int(e[0]))] if isinstance(declared, dict) else []
    known = _added_contents(data)
    missing: dict[str, Any] = {
        e["content"]: e for e in entries if isinstance(e, dict) and e.get("content") not in known
    }
    for content in missing:
        check_content(content, "the added token")
    missing |= {c: {"content": c, "special": True} for c in tokens.values() if c not in known and c not in missing}
    if not missing:
        return data, []
    named = set(tokens.values())
    described = [{**e, "special": bool(e.get("special")) or c in named} for c, e in missing.items()]
    shown = ", ".join(map(repr, list(missing)[:3])) + (", …" if len(missing) > 3 else "")
    from penstock.prepare.tokenizer.reference import with_added_tokens

    return with_added_tokens(data, described), [
        f"tokenizer.json lacks {len(missing)} token(s) that tokenizer_config.json declares ({shown}); "
        "they are added, as transformers does"
    ]


def _added_contents(data: bytes) -> set[str]:
    """The contents of the added tokens in a tokenizer.json, without parsing the vocabulary if possible."""
    start, end = data.find(b'"added_tokens"'), data.find(b'"normalizer"')
    part = b"{" + data[start:end].rstrip().rstrip(b",") + b"}" if 0 <= start < end else data
    try:
        found = orjson.loads(part)
    except orjson.JSONDecodeError:
        found = orjson.loads(data)
    return {str(token["content"]) for token in found.get("added_tokens") or []}
