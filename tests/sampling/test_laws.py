"""Draws against laws computed by hand: each transform alone, then all of them together.

Each law: 40,000 draws with fixed seeds, the chi-square statistic over the tokens of the law (all have an expected
count of at least 90), and a false-alarm rate of 1e-4. With 16 laws, a correct sampler with new seeds fails
this module once in some 600 runs. Tokens outside the law must not come at all.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jdecode import sampling
from jdecode.sampling import draw

NUM_DRAWS = 40_000
FALSE_ALARM = 1e-4
VOCAB = 11
HUNDREDTHS = [2, 10, 4, 7, 3, 20, 5, 9, 6, 30, 4]  # the law before any transform; the argmax at V - 2
LN2, LN3 = float(np.log(2)), float(np.log(3))

# Name: transform, config, prompt, accepted output, weights of the resulting law (up to a factor).
CASES = {
    "plain": (sampling.Temperature(), {}, [1], [], HUNDREDTHS),
    # squares
    "temperature": (
        sampling.Temperature(), {"temperature": 0.5}, [1], [], [4, 100, 16, 49, 9, 400, 25, 81, 36, 900, 16],
    ),
    "top_k": (sampling.TopK(), {"top_k": 4}, [1], [], [0, 10, 0, 0, 0, 20, 0, 9, 0, 30, 0]),
    # .30, .50 < .55 <= .60
    "top_p": (sampling.TopP(), {"top_p": 0.55}, [1], [], [0, 10, 0, 0, 0, 20, 0, 0, 0, 30, 0]),
    # from .3 * .30 = .09 on
    "min_p": (sampling.MinP(), {"min_p": 0.3}, [1], [], [0, 10, 0, 0, 0, 20, 0, 9, 0, 30, 0]),
    # entropy 2.0757: nearest are .10, .09, .20, .07, with sums .10, .19, .39 < .40 <= .46
    "typical_p": (sampling.TypicalP(), {"typical_p": 0.4}, [1], [], [0, 10, 0, 7, 0, 20, 0, 9, 0, 0, 0]),
    # times 3, by half
    "bias": (
        sampling.LogitBias(), {"logit_bias": ((0, LN3), (5, -LN2))}, [1], [], [6, 10, 4, 7, 3, 10, 5, 9, 6, 30, 4],
    ),
    "allowed": (
        sampling.PermittedTokens(), {"allowed_token_ids": (1, 5, 8)}, [1], [], [0, 10, 0, 0, 0, 20, 0, 0, 6, 0, 0],
    ),
    "banned": (sampling.PermittedTokens(), {"banned_token_ids": (9, 5)}, [1], [], [2, 10, 4, 7, 3, 0, 5, 9, 6, 0, 4]),
    # logits are log p < 0, doubled: .30 to .09 (prompt), .20 to .04 (output)
    "repetition": (
        sampling.TokenPenalties(), {"repetition_penalty": 2.0}, [9], [5], [2, 10, 4, 7, 3, 4, 5, 9, 6, 9, 4],
    ),
    # output 5: by half; prompt 9: not at all
    "presence": (
        sampling.TokenPenalties(), {"presence_penalty": LN2}, [9], [5, 5], [2, 10, 4, 7, 3, 10, 5, 9, 6, 30, 4],
    ),
    # output 5 twice: a quarter
    "frequency": (
        sampling.TokenPenalties(), {"frequency_penalty": LN2}, [9], [5, 5], [2, 10, 4, 7, 3, 5, 5, 9, 6, 30, 4],
    ),
    # 1 9 was followed by 5
    "ngram": (
        sampling.NoRepeatNgram(), {"no_repeat_ngram_size": 3}, [1, 9, 5], [1, 9],
        [2, 10, 4, 7, 3, 0, 5, 9, 6, 30, 4],
    ),
    "min_new_tokens": (
        sampling.MinNewTokens(), {"min_new_tokens": 2}, [1], [3], [2, 10, 4, 7, 3, 20, 5, 9, 6, 0, 4],
    ),
    # Temperature, top-k, top-p. Squares; the four greatest are 900, 400, 100, 81 of 1481; sums .608, .878, .945: for
    # 0.9 the fourth goes. In another order four or five tokens would stay.
    "filters": (
        sampling.standard_chain(), {"temperature": 0.5, "top_k": 4, "top_p": 0.9}, [1], [],
        [0, 100, 0, 0, 0, 400, 0, 0, 0, 900, 0],
    ),
    # Everything. Bias: 0 to .06, 5 to the root of .24. Banned: 3. Repetition doubles the logits of what the row holds:
    # 5 to .24; 2, 6, 8, 10 to .36 hundredths or less. Presence halves the output: 5 to .12. The prompt's n-gram 2 8
    # was followed by 6: banned. Stop token 4 is held back. In hundredths 6 10 .08 0 0 12 0 9 .18 30 .16, squared
    # 36 100 .01 0 0 144 0 81 .03 900 .03. Top-k 5: 900 144 100 81 36 of 1261. Top-p .93: .714, .828, .907, .972, four
    # of 1225. Min-p .1: from 90 on, three of 1144: .787 .126 .087, entropy .663, distances .42 1.41 1.77. Typical .9:
    # .787, .913, two.
    "everything": (
        sampling.standard_chain(),
        {
            "logit_bias": ((0, LN3), (5, float(np.log(0.24) / 2 - np.log(0.20)))), "banned_token_ids": (3,),
            "repetition_penalty": 2.0, "presence_penalty": LN2, "no_repeat_ngram_size": 3, "min_new_tokens": 9,
            "temperature": 0.5, "top_k": 5, "top_p": 0.93, "min_p": 0.1, "typical_p": 0.9,
        },
        [2, 8, 6, 10], [5, 2, 8],
        [0, 0, 0, 0, 0, 144, 0, 0, 0, 900, 0],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_law(params_of, name: str):
    transform, fields, prompt, output, weights = CASES[name]
    stop_ids = (4,) if name == "everything" else (9,)
    params = params_of({"temperature": 1.0, **fields}, vocab=VOCAB, prompt=prompt, stop_ids=stop_ids)
    state = transform.init(params, 1, VOCAB)
    for token in output:
        state = transform.accept(state, jnp.asarray([token]), jnp.asarray([True]))
    logits_BV = transform.apply(jnp.log(jnp.asarray([HUNDREDTHS], jnp.float32) / 100), state)

    many_BV = jnp.broadcast_to(logits_BV, (NUM_DRAWS, VOCAB))
    key_B = jnp.broadcast_to(sampling.request_keys([list(CASES).index(name)], [0]), (NUM_DRAWS,))
    token_B = jax.jit(draw.draw)(many_BV, key_B, jnp.arange(NUM_DRAWS), jnp.full(NUM_DRAWS, True))
    counts = np.bincount(np.asarray(token_B), minlength=VOCAB)

    expected = np.asarray(weights, np.float64) * NUM_DRAWS / sum(weights)
    held = expected > 0
    assert counts[~held].sum() == 0, counts
    statistic = ((counts[held] - expected[held]) ** 2 / expected[held]).sum()
    assert statistic < stats.chi2.isf(FALSE_ALARM, held.sum() - 1), (counts, expected)
