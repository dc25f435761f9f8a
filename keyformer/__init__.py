"""Long-context generation with mlx-lm in a fixed amount of memory."""

from .batch import BatchKeyformerKVCache
from .cache import KeyformerKVCache
from .hook import attached, cache_counts, make_prompt_cache
from .policies import (
    H2O,
    POLICIES,
    Full,
    KeyDiff,
    Keyformer,
    KeyformerProxy,
    Knorm,
    Policy,
    Random,
    SnapKV,
    Streaming,
    Tova,
    Window,
    make_policy,
)
from .rope import rope_remap_positions
from .state import (
    KeyformerState,
    full_keyformer_fp16_bytes,
    init_keyformer_state,
    keyformer_fp16_bytes,
    keyformer_fused_evict,
    keyformer_get_kv,
    keyformer_update,
    keyformer_update_batched,
    metal_available,
)

__all__ = [
    "H2O",
    "POLICIES",
    "BatchKeyformerKVCache",
    "Full",
    "KeyDiff",
    "Keyformer",
    "KeyformerKVCache",
    "KeyformerProxy",
    "KeyformerState",
    "Knorm",
    "Policy",
    "Random",
    "SnapKV",
    "Streaming",
    "Tova",
    "Window",
    "attached",
    "cache_counts",
    "full_keyformer_fp16_bytes",
    "init_keyformer_state",
    "keyformer_fp16_bytes",
    "keyformer_fused_evict",
    "keyformer_get_kv",
    "keyformer_update",
    "keyformer_update_batched",
    "make_policy",
    "make_prompt_cache",
    "metal_available",
    "rope_remap_positions",
]
