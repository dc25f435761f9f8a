"""Long-context generation with mlx-lm in a fixed amount of memory."""

from .cache import BatchKeyformerKVCache, KeyformerKVCache
from .hook import attached, make_prompt_cache
from .policies import H2O, POLICIES, Full, Keyformer, KeyformerProxy, Policy, Window, make_policy

__all__ = [
    "H2O",
    "POLICIES",
    "BatchKeyformerKVCache",
    "Full",
    "Keyformer",
    "KeyformerKVCache",
    "KeyformerProxy",
    "Policy",
    "Window",
    "attached",
    "make_policy",
    "make_prompt_cache",
]
