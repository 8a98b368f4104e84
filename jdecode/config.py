"""Frozen configurations. They hold no arrays and import no jax, so every one of them is hashable and static."""

import dataclasses
import math
import numbers

from jdecode.config_cache import (
    CACHE_DTYPES,
    CACHE_LAYOUTS,
    EVICTIONS,
    GROUP_LEN,
    GROUP_LENS,
    GROUPED_DTYPES,
    MOST_RECENT,
    SMOOTHING,
    CacheConfig,
    StreamingConfig,
)
from jdecode.config_checks import check, check_count, check_number

__all__ = [  # what stands in config_cache and config_checks is used through this module
    "CACHE_DTYPES",
    "CACHE_LAYOUTS",
    "EVICTIONS",
    "GROUPED_DTYPES",
    "GROUP_LEN",
    "GROUP_LENS",
    "MASK_FREE",
    "MOST_DRAFT_TOKENS",
    "MOST_RECENT",
    "SINK_POSITIONS",
    "SMOOTHING",
    "VERIFY_RULES",
    "CacheConfig",
    "LayerConfig",
    "MeshConfig",
    "ModelConfig",
    "RopeConfig",
    "RunConfig",
    "SamplingConfig",
    "SpeculativeConfig",
    "StreamingConfig",
    "check",
    "check_count",
    "check_number",
]

VERIFY_RULES = ("rejection", "coupled")  # of speculative decoding
MOST_DRAFT_TOKENS = 64  # each place of a block holds a copy of the sampling state and a row of logits
SINK_POSITIONS = ("cache", "text")
MASK_FREE = None  # a layer without a window sees every earlier position


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Describes rotary position embedding (Su et al. 2021) for one layer.

    Attributes:
      theta: base of the geometric series of wavelengths.
      scaling: ``"none"``; ``"linear"`` (every frequency divided by ``factor``); ``"llama3"`` (low frequencies
        divided by ``factor``, high ones kept, those between blended; Llama 3.1 model card).
      factor: see ``scaling``.
      low_freq_factor, high_freq_factor: edges of the blended band, ``llama3`` only.
      original_max_positions: trained length before scaling, in tokens, ``llama3`` only.
    """

    theta: float = 10_000.0
    scaling: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    def __post_init__(self) -> None:
        known = ("none", "linear", "llama3")
        check(self.scaling in known, f"rope scaling: expected one of {', '.join(known)}, got {self.scaling!r}")
        check(self.theta > 0, f"rope theta: expected a number over 0, got {self.theta}")
        check(self.factor > 0, f"rope factor: expected a number over 0, got {self.factor}")
        if self.scaling == "llama3":
            check(
                self.high_freq_factor > self.low_freq_factor > 0,
                f"rope llama3: expected high_freq_factor > low_freq_factor > 0, "
                f"got {self.high_freq_factor} and {self.low_freq_factor}",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Describes what may differ between the layers of one model.

    Attributes:
      window: a query at position q sees keys at positions over ``q - window``; ``None`` for no window.
      num_sinks: the first positions of a text, which stay visible whatever the window (Xiao et al. 2024).
      sink_positions: what a query's distance to the sinks is counted in: ``"cache"`` (the sinks, and the window behind
        them, numbered as they are held, so that no distance reaches the sum of both) or ``"text"`` (it grows with the
        text, past what any model was trained for).
      rope: rotary embedding of this layer; ``None`` for a layer without one.
    """

    window: int | None = MASK_FREE
    num_sinks: int = 0
    sink_positions: str = SINK_POSITIONS[0]
    rope: RopeConfig | None = RopeConfig()

    def __post_init__(self) -> None:
        check(
            self.window is None or self.window >= 1,
            f"window: expected a count of at least 1 or none, got {self.window}",
        )
        check(self.num_sinks >= 0, f"num_sinks: expected a count of at least 0, got {self.num_sinks}")
        known = " or ".join(SINK_POSITIONS)
        check(self.sink_positions in SINK_POSITIONS, f"sink_positions: expected {known}, got {self.sink_positions!r}")
        check(
            self.sink_positions == SINK_POSITIONS[0] or (self.num_sinks > 0 and self.window is not None),
            f"sink_positions: expected a window with sinks beside {self.sink_positions}, got none; leave it out",
        )

    @property
    def turns_sinks(self) -> bool:
        """Whether queries meet the sinks from another position than their own; see ``models.sinks``."""
        is_counted_anew = self.num_sinks > 0 and self.window is not None and self.sink_positions == SINK_POSITIONS[0]
        return is_counted_anew and self.rope is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Describes a decoder-only transformer: shapes and the choices in which families differ.

    Attributes:
      vocab_size: V. hidden_size: D. intermediate_size: F. num_heads: N. num_kv_heads: K. head_dim: H.
      layers: one entry a layer, so L is ``len(layers)``.
      activation: of the gated feed-forward, ``"silu"`` or ``"gelu_tanh"``.
      norm_eps: added to the mean square under the root of every RMSNorm.
      norm_offset: added to every norm scale (0 for Llama; 1 for Gemma, whose files hold scale - 1).
      query_scale: factor on q·k; ``None`` for ``head_dim ** -0.5``.
      embedding_scale: factor on embedded tokens (Gemma: ``sqrt(hidden_size)``).
      tie_embeddings: whether the output head is the embedding matrix.
      qkv_bias, output_bias, feed_forward_bias: which linear layers have a bias.
      qk_norm: RMSNorm over the head width of queries and keys, before rope.
      post_norms: a second RMSNorm after attention and after the feed-forward, before the residual sum.
      attention_soft_cap, final_soft_cap: ``cap * tanh(x / cap)`` on scores (after the scale, before the mask)
        and on logits; ``None`` for none.
      max_positions: the length that the model was trained for, in tokens. Information: nothing is clipped to it.
      family: the name under which ``models/families`` knows the model.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    activation: str = "silu"
    norm_eps: float = 1e-5
    norm_offset: float = 0.0
    query_scale: float | None = None
    embedding_scale: float = 1.0
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    feed_forward_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    max_positions: int = 2048
    family: str = "llama"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"):
            check_count(name, getattr(self, name), 1)
        check(len(self.layers) >= 1, "layers: expected at least one layer, got none")
        check(
            self.num_heads % self.num_kv_heads == 0,
            f"num_kv_heads: expected a divisor of num_heads {self.num_heads}, got {self.num_kv_heads}",
        )
        check(self.head_dim % 2 == 0, f"head_dim: expected an even number (rope rotates pairs), got {self.head_dim}")
        check(
            self.activation in ("silu", "gelu_tanh"),
            f"activation: expected silu or gelu_tanh, got {self.activation!r}",
        )
        for name in ("attention_soft_cap", "final_soft_cap"):
            cap = getattr(self, name)
            check(cap is None or cap > 0, f"{name}: expected a number over 0 or none, got {cap}")

    @property
    def num_layers(self) -> int:
        """L, the number of layers."""
        return len(self.layers)

    @property
    def attention_scale(self) -> float:
        """The factor on q·k."""
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Says how the next token is chosen. The default is greedy.

    The order is fixed: logit bias, allowed and banned ids, penalties, no-repeat n-grams, minimum length, the
    caller's own transforms, temperature, top-k, top-p, min-p, typical-p, renormalise, draw.

    Attributes:
      temperature: divides the logits; 0 is exact argmax (the lowest id of a tie).
      top_k: keep the k most likely tokens; anything outside ``1 .. V-1`` keeps all.
      top_p: keep the fewest, most likely tokens whose sum reaches p (Holtzman et al. 2020); 1 keeps all, 0 one.
      min_p: keep tokens with at least ``min_p`` times the greatest probability (Nguyen et al. 2024); 0 keeps all.
      typical_p: keep the tokens nearest to the expected surprise, up to this sum (Meister et al. 2023); 1 keeps all.
      repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output
        (Keskar et al. 2019); 1 does nothing.
      presence_penalty: subtracted once from the logit of each token in the output.
      frequency_penalty: subtracted for each occurrence of the token in the output.
      no_repeat_ngram_size: bans tokens that would complete an n-gram for the second time (prompt and output);
        0 is off.
      min_new_tokens: stop tokens cannot be drawn before so many tokens are out.
      logit_bias: pairs (token id, number to add).
      allowed_token_ids: when not empty, no other token can be drawn.
      banned_token_ids: these tokens cannot be drawn.
      seed: of the draws. ``None`` draws a fresh one; 0 is a seed like any other.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    min_new_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        at_least_0, share = "a finite number of at least 0", "a number from 0 to 1"
        check_number("temperature", self.temperature, 0, math.inf, at_least_0)
        for name in ("top_p", "min_p", "typical_p"):
            check_number(name, getattr(self, name), 0, 1, share)
        over_0 = "a finite number over 0"
        check_number("repetition_penalty", self.repetition_penalty, 0, math.inf, over_0, exclusive=True)
        for name in ("presence_penalty", "frequency_penalty"):
            check_number(name, getattr(self, name), -math.inf, math.inf, "a finite number")
        is_whole = isinstance(self.top_k, numbers.Integral) and not isinstance(self.top_k, bool)
        check(is_whole, f"top_k: expected a whole number (0 keeps all), got {self.top_k!r}")
        for name in ("no_repeat_ngram_size", "min_new_tokens"):
            check_count(name, getattr(self, name), 0)
        if self.seed is not None:
            check_count("seed", self.seed, 0, " and under 2**63, or none")
            check(self.seed < 2**63, f"seed: expected a whole number from 0 to 2**63 - 1 or none, got {self.seed}")
        for name in ("logit_bias", "allowed_token_ids", "banned_token_ids"):
            value = getattr(self, name)
            check(isinstance(value, (tuple, list)), f"{name}: expected a tuple, got {value!r}")
        for pair in self.logit_bias:
            is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
            check(is_pair, f"logit_bias: expected pairs (token id, number), got {pair!r}")
            check_number(f"logit_bias of token {pair[0]}", pair[1], -math.inf, math.inf, "a finite number")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Says how a draft speeds decoding up (speculative decoding; Leviathan et al. 2023).

    Attributes:
      draft: ``"ngram"`` (what followed the latest tokens before), ``"layer_skip"`` (the target's first layers), or the
        weights of a smaller model with the same tokens: a packaged name, a path or a hub id. ``None`` for no draft.
      num_draft_tokens: the most tokens that are proposed at once.
      verify: ``"rejection"`` accepts most and keeps the law of the text; ``"coupled"`` keeps the text of each seed.
      adaptive: propose fewer tokens, or none, while few are accepted.
    """

    draft: str | None = None
    num_draft_tokens: int = 4
    verify: str = "rejection"
    adaptive: bool = True

    def __post_init__(self) -> None:
        check(self.draft != "", "draft: expected ngram, layer_skip, weights or null, got an empty text")
        check_count("num_draft_tokens", self.num_draft_tokens, 1, f" and at most {MOST_DRAFT_TOKENS}")
        check(
            self.num_draft_tokens <= MOST_DRAFT_TOKENS,
            f"num_draft_tokens: expected a count from 1 to {MOST_DRAFT_TOKENS}, got {self.num_draft_tokens}",
        )
        check(self.verify in VERIFY_RULES, f"verify: expected one of {', '.join(VERIFY_RULES)}, got {self.verify!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Says how many devices lie along each mesh axis; ``data`` splits rows, ``model`` splits heads and widths."""

    data: int = 1
    model: int = 1

    def __post_init__(self) -> None:
        for name in ("data", "model"):
            check_count(f"mesh {name}", getattr(self, name), 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Says what one run uses: a model, and what the command line starts from. The YAML files of ``configs/`` are these.

    Attributes:
      name: of the config; a file that gives none is named after itself.
      description: a sentence for people.
      weights: a hub id, or the path of a folder or file; ``None`` when the config names none.
      no_weights: why there are none, in half a sentence; only beside ``weights: null``.
      architecture: shapes for planning. Beside weights it is a promise: weights of another shape are refused.
      sampling, speculative, cache, mesh: see their classes.
      streaming: a window for layers that have none; ``None`` leaves the model as it is.
      max_new_tokens: the most tokens that a run writes.
      prompt: used when the caller gives none.
    """

    name: str = ""
    description: str = ""
    weights: str | None = None
    no_weights: str | None = None
    architecture: ModelConfig | None = None
    sampling: SamplingConfig = SamplingConfig()
    speculative: SpeculativeConfig = SpeculativeConfig()
    cache: CacheConfig = CacheConfig()
    streaming: StreamingConfig | None = None
    mesh: MeshConfig = MeshConfig()
    max_new_tokens: int = 64
    prompt: str | None = None

    def __post_init__(self) -> None:
        check_count("max_new_tokens", self.max_new_tokens, 1)
        check(self.weights != "", "weights: expected a hub id, a path or null, got an empty text")
        check(self.prompt != "", "prompt: expected some text or null, got an empty text")
        check(
            self.weights is not None or self.architecture is not None,
            "expected weights, an architecture or both, got neither",
        )
        check(
            self.weights is None or self.no_weights is None,
            f"no_weights: expected none beside weights {self.weights!r}, got {self.no_weights!r}",
        )
