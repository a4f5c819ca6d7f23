"""What patched forks call: caches that can go back, and the real places inside any model."""

from ddaudit.runtime.caches.cache import crop_cache, keep_in_cache
from ddaudit.runtime.caches.making import make_cache
from ddaudit.runtime.models.architecture import decoder_layers, final_norm, layer_output, stop_token_ids, text_config

__all__ = [
    "crop_cache",
    "decoder_layers",
    "final_norm",
    "keep_in_cache",
    "layer_output",
    "make_cache",
    "stop_token_ids",
    "text_config",
]
