"""Reading a config.json: every field that changes the result must be understood, or the config is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megakernel.errors import UnsupportedConfig

IGNORED: frozenset[str] = frozenset(
    {
        "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "auto_map", "tokenizer_class",
        "name_or_path", "attn_implementation", "use_cache", "initializer_range", "pad_token_id", "bos_token_id",
        "eos_token_id", "sep_token_id", "decoder_start_token_id", "unk_token_id", "attention_dropout",
        "hidden_dropout", "residual_dropout", "embedding_dropout", "classifier_dropout", "embd_pdrop", "resid_pdrop",
        "attn_pdrop", "resid_dropout", "embd_dropout",
        "output_hidden_states", "output_attentions", "output_scores", "return_dict", "return_dict_in_generate",
        "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params", "prefix",
        "chunk_size_feed_forward", "is_encoder_decoder", "is_decoder", "add_cross_attention",
        "cross_attention_hidden_size", "tie_encoder_decoder", "pruned_heads", "torchscript", "use_bfloat16",
        "tf_legacy_loss", "remove_invalid_values", "max_length", "min_length", "do_sample", "early_stopping",
        "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p",
        "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
        "bad_words_ids", "num_return_sequences", "forced_bos_token_id", "forced_eos_token_id",
        "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "pretraining_tp",
        "max_sequence_length", "is_llama_config", "transformers.js_config", "unsloth_version", "unsloth_fixed",
    }
)  # fmt: skip
"""Fields that leave the logits as they are: training, generation defaults, bookkeeping. `_x` is private to a writer."""

ACTIVATIONS: dict[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""Activation names of configs -> those of Graph operators."""


class Fields:
    """A config's fields, each read at most by name. `finish` refuses what nobody read.

    Every reader takes a default for an absent or null field; without one the field must be there.
    Raises UnsupportedConfig naming the field, what was expected and what it holds.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self._read: set[str] = set()

    @property
    def architecture(self) -> str:
        names = self.config.get("architectures")
        return str(names[0]) if isinstance(names, (list, tuple)) and names else "unnamed"

    def raw(self, name: str) -> Any:
        """The value as it is, None when absent."""
        self._read.add(name)
        return self.config.get(name)

    def null(self, name: str) -> bool:
        """Whether the field is there and holds null, which differs from being absent."""
        return name in self.config and self.config[name] is None

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number above 0."""
        value = self._value(name, default, "a whole number above 0")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(name, "a whole number above 0")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self._value(name, default, "a number above 0")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise self.wrong(name, "a number above 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default, "true or false")
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def activation(self, name: str, default: str) -> str:
        """The Graph's name of an activation."""
        value = self._value(name, default, "an activation")
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise self.wrong(name, f"one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[value]

    def each(self, name: str, default: Sequence[Any], *allowed: Any) -> tuple[Any, ...]:
        """A list as long as the default (one entry for each layer), which an absent, null or empty one means."""
        given = self.raw(name) or default
        if not isinstance(given, (list, tuple)) or len(given) != len(default) or any(v not in allowed for v in given):
            raise self.wrong(name, f"{len(default)} times {' or '.join(map(str, allowed))}")
        return tuple(given)

    def only(self, name: str, *allowed: Any) -> None:
        """The field, when it says anything, must hold one of these."""
        value = self.raw(name)
        if value is not None and value not in allowed:
            raise self.wrong(name, f"{' or '.join(map(repr, allowed))} in this architecture")

    def finish(self) -> None:
        """Refuse fields that were not read, are not null and may change the result."""
        unknown = sorted(
            name for name, value in self.config.items()
            if value is not None and name not in self._read and name not in IGNORED and not name.startswith("_")
        )  # fmt: skip
        if unknown:
            shown = ", ".join(f"{name} = {self.config[name]!r}" for name in unknown)
            raise UnsupportedConfig(
                f"config of {self.architecture}: not understood, and may change the result: {shown}; "
                "remove a field if it has no effect"
            )

    def wrong(self, name: str, expected: str) -> UnsupportedConfig:
        got = repr(self.config[name]) if name in self.config else "no such field"
        return UnsupportedConfig(f"config of {self.architecture}, field {name}: expected {expected}, got {got}")

    def _value(self, name: str, default: Any, expected: str) -> Any:
        value = self.raw(name)
        value = default if value is None else value
        if value is None:
            raise self.wrong(name, expected)
        return value
