"""Speculative decoding: a draft proposes, the target verifies, inside the device loop."""

from jdecode.speculative.draft import Draft
from jdecode.speculative.draft_layer_skip import LayerSkipDraft
from jdecode.speculative.draft_model import ModelDraft
from jdecode.speculative.draft_ngram import NgramDraft

__all__ = ["Draft", "LayerSkipDraft", "ModelDraft", "NgramDraft"]
