"""Text to token ids and back, one token at a time: UTF-8 bytes for byte-level models, `tokenizer.json` for the rest."""

import codecs
import pathlib
from collections.abc import Callable
from typing import Protocol

from jax_warp_decode.checkpoints.reader import CONFIG_FILE, MAX_CONFIG_BYTES, read_json
from jax_warp_decode.checkpoints.sources import check_regular
from jax_warp_decode.errors import ArgumentError, CheckpointError, UnsupportedError
from jax_warp_decode.models.settings import show

GENERATION_FILE = "generation_config.json"


class TextCodec(Protocol):
    """What the demo needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; `ArgumentError` if it has none."""

    def stream(self) -> Callable[[int], str]:
        """A new decoder: takes the next id, returns the text that is complete by now (may be empty)."""


class ByteCodec:
    """Token ids are the UTF-8 bytes of the text.

    Example:
      >>> from jax_warp_decode.text import ByteCodec
      >>> ByteCodec().encode("é")
      [195, 169]
      >>> step = ByteCodec().stream()
      >>> step(195), step(169)
      ('', 'é')
    """

    def encode(self, text: str) -> list[int]:
        try:
            return list(text.encode())
        except UnicodeEncodeError as e:
            raise ArgumentError(f"prompt: got {text!a}, which is no text in UTF-8: {e.reason}") from None

    def stream(self) -> Callable[[int], str]:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return lambda token: decoder.decode(bytes((token,)))


class TokenizerCodec:
    """A Hugging Face `tokenizer.json`, through the `tokenizers` package.

    Raises:
      UnsupportedError: if `tokenizers` is not installed.
      CheckpointError: if the file cannot be read as a tokenizer.
    """

    def __init__(self, path: pathlib.Path):
        try:
            import tokenizers
            import tokenizers.decoders
        except ImportError as e:
            raise UnsupportedError(
                f"checkpoint: {path} needs the tokenizers package, which is not installed; pip install tokenizers"
            ) from e
        check_regular(path)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except BaseException as e:  # plain ones for malformed files; a panic of Rust is not even an Exception
            if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
                raise
            raise CheckpointError(f"checkpoint: {path} is not a readable tokenizer: {show(str(e))}") from e
        self._new_stream = tokenizers.decoders.DecodeStream

    def encode(self, text: str) -> list[int]:
        try:
            return self._tokenizer.encode(text).ids
        except Exception as e:  # a plain one too; what Python could not decode is no text for it
            raise ArgumentError(f"prompt: got {text!a}, which the tokenizer of the model cannot encode: {e}") from e

    def stream(self) -> Callable[[int], str]:
        stream = self._new_stream(skip_special_tokens=False)
        return lambda token: stream.step(self._tokenizer, token) or ""


def codec_for(folder: str | pathlib.Path, vocab_size: int) -> TextCodec:
    """The codec of a checkpoint folder: its `tokenizer.json` if there is one, else bytes for a vocabulary of 256.

    Raises:
      CheckpointError: if the folder has no `tokenizer.json` and the model is not byte-level.
      UnsupportedError: if a `tokenizer.json` is there but the `tokenizers` package is not.
    """
    path = pathlib.Path(folder) / "tokenizer.json"
    if path.is_file():
        return TokenizerCodec(path)
    if vocab_size != 256:
        raise CheckpointError(
            f"checkpoint: {folder} has no tokenizer.json and its vocab_size is {vocab_size}, expected a tokenizer.json "
            f"or a byte-level model (vocab_size 256); copy the tokenizer.json of the model into the folder")
    return ByteCodec()


def end_tokens(folder: pathlib.Path) -> frozenset[int]:
    """Token ids that end a text, of a checkpoint folder: `eos_token_id` of generation_config.json, else of config.json.

    Raises:
      CheckpointError: one that is no token id.

    Source: GenerationConfig of Hugging Face transformers.

    Example:
      >>> from jax_warp_decode.demo import bundled_model
      >>> from jax_warp_decode.text import end_tokens
      >>> end_tokens(bundled_model("bf16"))
      frozenset()
    """
    for path in (folder / GENERATION_FILE, folder / CONFIG_FILE):
        found = read_json(path, MAX_CONFIG_BYTES).get("eos_token_id") if path.is_file() else None
        if found is not None:
            ids = found if isinstance(found, list) else [found]
            if not all(type(token) is int and token >= 0 for token in ids):
                raise CheckpointError(f"{path}: got eos_token_id {show(found)}, expected a token id or a list of them")
            return frozenset(ids)
    return frozenset()
