"""Tiny random checkpoints of every model family, in Hugging Face format, small enough to make in a test.

Random weights at the usual scale answer with one repeated token and near-ties, which makes equality tests empty or
flaky. So the weights are large, and each family has a seed that was searched for: the greedy continuation of every
one of PROMPTS has varied tokens and a clear winner at each step. `greedy_gaps` is how that is checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

PROMPTS = (
    "The river carries the boats to the sea",
    "Every morning the baker opens the door",
    "Snow fell",
    "A narrow strip of land joins two large countries, and the trade of both must cross it.",
)
"""Prompts for which every family's default seed is checked."""
BOS, EOS, PAD = "<s>", "</s>", "<pad>"
VOCAB_SIZE = 384
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
TRAINING_TEXT = """
An isthmus is a narrow strip of land that joins two larger ones and has water on either side. Where the strip is
narrow enough, people dig a canal, and the ships that once sailed around a continent pass from one sea to the other
in a day. The river carries the boats to the sea; the tide carries them back. Every morning the baker opens the door
of the shop, sweeps the snow from the step and lights the oven. In the harbour the fishermen count their nets, the
children count the gulls, and nobody counts the hours. When the wind turns, the smoke of the oven drifts over the
water, and the sailors say that they can smell the bread before they can see the town. There are 12 streets, 3 wells,
1 bridge and 365 days in the year; on 24 of them it rains. "Is it far?" asked the stranger. "Not very," said the
baker: "two hours by boat, four by road, and the rest of your life if you stop to talk to my brother."
"""


@dataclass(frozen=True, slots=True)
class TinyFamily:
    """How to make one family: its transformers model_type, what differs from COMMON, and the checked seed and scale."""

    model_type: str
    settings: Mapping[str, Any]
    seed: int
    init_std: float


COMMON: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": False,
    }
)
FAMILIES: Mapping[str, TinyFamily] = MappingProxyType(
    {
        "llama": TinyFamily("llama", {}, seed=324, init_std=0.5),
        "smollm2": TinyFamily("llama", {"tie_word_embeddings": True}, seed=244, init_std=0.5),
        "mistral": TinyFamily("mistral", {"sliding_window": 16}, seed=262, init_std=0.5),
        "qwen2": TinyFamily("qwen2", {}, seed=296, init_std=0.4),
        "qwen3": TinyFamily("qwen3", {"head_dim": 32}, seed=201, init_std=0.5),
        "gemma3": TinyFamily(
            "gemma3_text",
            {
                "head_dim": 32,
                "query_pre_attn_scalar": 32,
                "sliding_window": 16,
                "layer_types": ["sliding_attention", "full_attention"],
                # Tied, the scaled embedding of the last token would win every time.
                "tie_word_embeddings": False,
            },
            seed=320,
            init_std=0.4,
        ),
    }
)


def tiny_model(
    family: str,
    path: Path,
    *,
    seed: int | None = None,
    init_std: float | None = None,
    max_len: int = 512,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str | int = "1GB",
    **overrides: Any,
) -> Path:
    """Write a checkpoint of `family` (a key of FAMILIES) with tokenizer into the folder `path`, and return it.

    seed, init_std: None = the family's checked ones.  overrides: settings of the Hugging Face config.
    Raises KeyError for an unknown family.
    """
    tiny = FAMILIES[family]
    tokenizer = tiny_tokenizer()
    settings = {
        **COMMON,
        **tiny.settings,
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "max_position_embeddings": max_len,
        "initializer_range": tiny.init_std if init_std is None else init_std,
        **overrides,
    }
    model = _random_model(CONFIG_MAPPING[tiny.model_type](**settings), tiny.seed if seed is None else seed)
    model.to(dtype).save_pretrained(path, max_shard_size=max_shard_size)
    tokenizer.save_pretrained(path)
    return Path(path)


def _random_model(config: Any, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            # Norms start as ones and biases as zeros, which would hide a weight that is not applied.
            for param in model.parameters():
                if param.dim() == 1:
                    param.add_(0.1 * torch.randn_like(param))
    return model


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of VOCAB_SIZE ids with bos (which it adds), eos, pad and a chat template."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained_tokenizer()), bos_token=BOS, eos_token=EOS, pad_token=PAD
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@lru_cache(maxsize=1)
def _trained_tokenizer() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT.splitlines(), trainer)
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bos)]
    )
    trained: str = tokenizer.to_str()
    return trained


@torch.inference_mode()
def greedy_logits(path: Path, prompt_token_ids: Sequence[int], num_tokens: int = 16) -> tuple[list[int], torch.Tensor]:
    """transformers' greedy continuation of a prompt in float32, eos ignored: token ids, and the logits [num_tokens, V]
    that each was chosen from.
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    token_ids, logits = list(prompt_token_ids), []
    for _ in range(num_tokens):
        logits.append(model(torch.tensor([token_ids])).logits[0, -1])
        token_ids.append(int(logits[-1].argmax()))
    return token_ids[len(prompt_token_ids) :], torch.stack(logits)


def greedy_gaps(path: Path, prompt_token_ids: Sequence[int], num_tokens: int = 16) -> tuple[list[int], list[float]]:
    """The same with the top-2 logit gap of each token in place of its logits."""
    token_ids, logits = greedy_logits(path, prompt_token_ids, num_tokens)
    top = logits.topk(2).values
    return token_ids, (top[:, 0] - top[:, 1]).tolist()
