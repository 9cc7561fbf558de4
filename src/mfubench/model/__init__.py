"""The decoder and what it is made of; see `decoder.py`."""

from mfubench.model.attention import resolve_attention
from mfubench.model.decoder import Decoder, build_model
from mfubench.model.loss import resolve_loss

__all__ = ["Decoder", "build_model", "resolve_attention", "resolve_loss"]
