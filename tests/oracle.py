"""The Transformer in NumPy float64, explicit and slow: what the tests compare the package with.

Written from the papers, formula by formula, and never from the package: this file imports numpy, math and typing only.
Nothing here is fast, differentiable or checked; where a loop says the formula best, it is a loop. Letters: B batch,
T query tokens, S key/value tokens, N query heads, K key/value heads, H head width, D model width, F feed-forward width,
V vocabulary, L layers. A position of -1 means that there is no token (padding, an empty cache slot).
"""

import math
from typing import Any

import numpy as np

Array = np.ndarray
Params = dict[str, Any]


def f64(x: Any) -> Array:
    return np.asarray(x, dtype=np.float64)


# Attention ------------------------------------------------------------------------------------------------------------


def softmax(x: Array, axis: int = -1) -> Array:
    """exp(x) / sum exp(x). An entry of -inf gets exactly 0; a slice of nothing but -inf has no softmax."""
    x = f64(x)
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def attention(
    q: Array,
    k: Array,
    v: Array,
    allowed: Array,
    bias: Array | None = None,
    *,
    scale: float,
    softcap: float | None = None,
    with_pattern: bool = False,
) -> Any:
    """z = pattern @ v with pattern = softmax(cap(scale * q . k) + bias) over the allowed keys; nothing allowed gives 0.

    q [B T N H], k and v [B S K H], allowed and bias [B|1 N|1 T S]; returns z [B T N H], with_pattern (z, [B N T S]).
    Vaswani et al. 2017, equation 1. Grouped queries: query head n reads kv head n // (N / K) (Ainslie et al. 2023,
    section 2.2). cap(x) = softcap * tanh(x / softcap), before the bias is added (Gemma 2, Gemma Team 2024, section 2).
    """
    q, k, v = f64(q), f64(k), f64(v)
    B, T, N, _ = q.shape
    S, K = k.shape[1:3]
    allowed = np.broadcast_to(allowed, (B, N, T, S))
    bias = np.broadcast_to(f64(0.0 if bias is None else bias), (B, N, T, S))
    z, pattern = np.zeros((B, T, N, v.shape[-1])), np.zeros((B, N, T, S))
    for b, n, t in np.ndindex(B, N, T):
        keys, head = np.flatnonzero(allowed[b, n, t]), n // (N // K)
        if len(keys) == 0:
            continue
        scores = scale * (k[b, keys, head] @ q[b, t, n])
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        pattern[b, n, t, keys] = softmax(scores + bias[b, n, t, keys])
        z[b, t, n] = pattern[b, n, t, keys] @ v[b, keys, head]
    return (z, pattern) if with_pattern else z


def elu_plus_one(x: Array) -> Array:
    """elu(x) + 1 with alpha = 1 (Katharopoulos et al. 2020, equation 7; Clevert et al. 2015, equation 15)."""
    x = f64(x)
    return np.where(x > 0, x, np.exp(np.minimum(x, 0)) - 1) + 1


def linear_attention(q: Array, k: Array, v: Array, allowed: Array, *, scale: float, feature_map: Any = elu_plus_one):
    """z_t = sum_s w_ts v_s / sum_s w_ts with w_ts = phi(scale * q_t) . phi(k_s) over the allowed s; no weight gives 0.

    Katharopoulos et al. 2020, "Transformers are RNNs", equations 4 and 9. Shapes and grouped queries as in attention().
    """
    q, k, v = f64(q), f64(k), f64(v)
    B, T, N, _ = q.shape
    S, K = k.shape[1:3]
    allowed, z = np.broadcast_to(allowed, (B, N, T, S)), np.zeros(q.shape)
    for b, n, t in np.ndindex(B, N, T):
        keys, head = np.flatnonzero(allowed[b, n, t]), n // (N // K)
        weights = feature_map(k[b, keys, head]) @ feature_map(scale * q[b, t, n])
        if weights.sum() != 0:
            z[b, t, n] = weights @ v[b, keys, head] / weights.sum()
    return z


def attention_gradients(
    q: Array,
    k: Array,
    v: Array,
    allowed: Array,
    bias: Array | None,
    dz: Array,
    *,
    scale: float,
    softcap: float | None = None,
) -> tuple[Array, Array, Array, Array]:
    """The gradients of sum(z * dz) for z = attention(...): dq, dk, dv, and dbias [B N T S].

    dv_s = sum_t p_ts dz_t;  dp_ts = dz_t . v_s;  da_ts = p_ts (dp_ts - sum_r p_tr dp_tr), which is the gradient of the
    bias;  dq_t = scale sum_s da_ts k_s,  dk_s = scale sum_t da_ts q_t, with da times 1 - (capped / softcap)^2 where
    scores are capped (Dao et al. 2022, "FlashAttention", appendix B.2). Key/value heads add up those of their group.
    """
    ones = np.ones((*np.shape(q)[:1], np.shape(q)[2], np.shape(q)[1], np.shape(k)[1]))
    return attention_with_factors(q, k, v, allowed, bias, ones, dz, scale=scale, softcap=softcap)[1:]


def attention_with_factors(
    q: Array, k: Array, v: Array, allowed: Array, bias: Array | None, factors: Array, dz: Array, **how: Any
) -> tuple[Array, ...]:
    """z and the gradients of sum(z * dz), dq, dk, dv and dbias, where the pattern is multiplied by factors [B N T S].

    Such factors are dropout's, 0 or 1 / (1 - rate) (Srivastava et al. 2014, section 4). With p' = p * factors,
    dv_s = sum_t p'_ts dz_t, and the rest is as without them for dp_ts = factors_ts (dz_t . v_s).
    """
    q, k, v, dz, factors = f64(q), f64(k), f64(v), f64(dz), f64(factors)
    G, softcap, scale = q.shape[2] // k.shape[2], how["softcap"], how["scale"]
    _, p = attention(q, k, v, allowed, bias, with_pattern=True, **how)
    keys, values = np.repeat(k, G, axis=2), np.repeat(v, G, axis=2)
    z = np.einsum("BNTS,BSNH->BTNH", p * factors, values)
    dp = factors * np.einsum("BTNH,BSNH->BNTS", dz, values)
    da = p * (dp - (p * dp).sum(axis=-1, keepdims=True))
    dscores = da
    if softcap is not None:
        dscores = da * (1 - np.tanh(scale * np.einsum("BTNH,BSNH->BNTS", q, keys) / softcap) ** 2)
    dk, dv = scale * np.einsum("BNTS,BTNH->BSNH", dscores, q), np.einsum("BNTS,BTNH->BSNH", p * factors, dz)
    dk, dv = (x.reshape(*k.shape[:3], G, k.shape[3]).sum(axis=3) for x in (dk, dv))
    return z, scale * np.einsum("BNTS,BSNH->BTNH", dscores, keys), dk, dv, da


def allowed(
    q_positions: Array,
    kv_positions: Array,
    q_segments: Array | None = None,
    kv_segments: Array | None = None,
    causal: bool = False,
    window: int | None = None,
    prefix: Array | None = None,
) -> Array:
    """Who may attend to whom: bool [B 1 T S] from positions and segments [B T] and [B S].

    Causal: Vaswani et al. 2017, section 3.2.3. Window: a causal query sees itself and the window - 1 positions before
    it (Jiang et al. 2023, "Mistral 7B", section 2); without causal, as many on either side. Prefix, [B] or [B T]: the
    first so many positions are seen by every token, whichever comes first (Raffel et al. 2020, figure 4, right), and a
    window bounds both sides of it.
    """
    q, kv = np.asarray(q_positions)[:, None, :, None], np.asarray(kv_positions)[:, None, None, :]
    ok = (kv >= 0) & np.ones_like(q, dtype=bool)
    if causal and prefix is None:
        ok &= kv <= q
    elif causal:
        first = np.asarray(prefix).reshape(len(prefix), 1, -1, 1)
        ok = ok & ((kv <= q) | ((kv < first) & (q >= 0)))
    if window is not None:
        ok &= abs(q - kv) < window
    if q_segments is not None:
        ok = ok & (np.asarray(q_segments)[:, None, :, None] == np.asarray(kv_segments)[:, None, None, :])
    return ok


# Positions ------------------------------------------------------------------------------------------------------------


def positions_from_segments(segments: Array) -> Array:
    """Counts 0, 1, 2, ... within each run of one non-zero segment id; -1 where the segment is 0 (padding)."""
    segments = np.asarray(segments)
    positions = np.full(segments.shape, -1, dtype=np.int64)
    for b, t in np.ndindex(*segments.shape):
        if segments[b, t] != 0:
            continues = t > 0 and segments[b, t] == segments[b, t - 1]
            positions[b, t] = positions[b, t - 1] + 1 if continues else 0
    return positions


def sinusoidal(positions: Array, D: int) -> Array:
    """[... D]: lane 2i is sin(pos / 10000^(2i/D)) and lane 2i+1 its cosine (Vaswani et al. 2017, section 3.5)."""
    out = np.zeros((*np.shape(positions), D))
    for i in range(D // 2):
        angle = f64(positions) / 10000.0 ** (2 * i / D)
        out[..., 2 * i], out[..., 2 * i + 1] = np.sin(angle), np.cos(angle)
    return out


def sinusoidal_halves(positions: Array, D: int) -> Array:
    """[... D]: lane i < D/2 is sin(pos / 10000^(2i/D)) and lane D/2 + i its cosine, as Marian's published models."""
    out = np.zeros((*np.shape(positions), D))
    for i in range(D // 2):
        angle = f64(positions) / 10000.0 ** (2 * i / D)
        out[..., i], out[..., D // 2 + i] = np.sin(angle), np.cos(angle)
    return out


def rotary_frequencies(rotary: Params, lanes: int) -> tuple[Array, float]:
    """Radians a position of each lane pair, and the factor on the turned lanes; rotary: the fields of a Rotary.

    Su et al. 2021, section 3.2.2: theta_i = base^(-2i/lanes). linear: positions are divided by the factor (Chen et al.
    2023, equation 3). ntk: base' = base * factor^(lanes / (lanes - 2)) (Peng et al. 2023, "YaRN", definition 1).
    by_parts (their equations 17 to 20): with r = original_len / wavelength turns in the original context, a lane keeps
    its own frequency by the share gamma = (r - slow) / (fast - slow), clipped to [0, 1], and 1 / factor of it else.
    yarn: gamma falls linearly with the lane instead, from the lane of `fast` turns, rounded down, to that of `slow`
    turns, rounded up (as the published models were trained); both q and k are scaled by 0.1 ln(factor) + 1.
    """
    base, factor, scaling, pairs = rotary["base"], rotary["factor"], rotary["scaling"], lanes // 2
    magnitude = rotary["magnitude"] or (0.1 * math.log(factor) + 1 if scaling == "yarn" else 1.0)
    if scaling == "ntk" and lanes > 2:  # a single pair has frequency 1 under every base
        base = base * factor ** (lanes / (lanes - 2))
    out = np.zeros(pairs)
    for i in range(pairs):
        theta = base ** (-2 * i / lanes)
        gamma = 1.0
        if scaling == "linear":
            gamma = 0.0
        if scaling == "by_parts":
            wavelength = 2 * math.pi / theta
            gamma = (rotary["original_len"] / wavelength - rotary["slow"]) / (rotary["fast"] - rotary["slow"])
        if scaling == "yarn":
            # The pair whose wavelength is original_len / turns, solved for i.
            low, high = (
                lanes * math.log(rotary["original_len"] / (2 * math.pi * turns)) / (2 * math.log(base))
                for turns in (rotary["fast"], rotary["slow"])
            )
            low, high = max(math.floor(low), 0), min(math.ceil(high), lanes - 1)
            gamma = 1 - (i - low) / (high - low) if high > low else float(i <= low)
        gamma = min(max(gamma, 0.0), 1.0)
        out[i] = gamma * theta + (1 - gamma) * theta / factor
    return out, magnitude


def rotary(
    x: Array,
    positions: Array,
    base: float = 10000.0,
    *,
    interleaved: bool = False,
    frequencies: Array | None = None,
    magnitude: float = 1.0,
) -> Array:
    """Turns pair i of the lanes of x [B T N H] by the angle position * frequency_i, positions [B T].

    Su et al. 2021, "RoFormer", equations 15 and 34, with frequency_i = base^(-2i/H) unless they are given. The paper
    pairs lanes (2i, 2i+1): interleaved. The default pairs (i, i + pairs), which is the same rotation with the lanes of
    each head permuted. Lanes beyond the pairs stay as they are.
    """
    x, H = f64(x), np.shape(x)[-1]
    if frequencies is None:
        frequencies = np.array([base ** (-2 * i / H) for i in range(H // 2)])
    out = x.copy()
    for i, frequency in enumerate(frequencies):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + len(frequencies))
        angle = f64(positions)[:, :, None] * frequency
        out[..., a] = magnitude * (x[..., a] * np.cos(angle) - x[..., b] * np.sin(angle))
        out[..., b] = magnitude * (x[..., b] * np.cos(angle) + x[..., a] * np.sin(angle))
    return out


def alibi_slopes(N: int) -> Array:
    """2^(-8/N), 2^(-16/N), ... for N a power of two (Press et al. 2022, section 3).

    Otherwise those of the power of two below N, then the first, third, ... of twice that power (their published code).
    """
    if N & (N - 1) == 0:
        return np.array([2.0 ** (-8.0 * (n + 1) / N) for n in range(N)])
    power = 2 ** int(math.log2(N))
    return np.concatenate([alibi_slopes(power), alibi_slopes(2 * power)[0::2][: N - power]])


def alibi(q_positions: Array, kv_positions: Array, N: int) -> Array:
    """-slope_n * |q - kv|, [B N T S] (Press et al. 2022, section 3)."""
    distance = abs(np.asarray(q_positions)[:, None, :, None] - np.asarray(kv_positions)[:, None, None, :])
    return -alibi_slopes(N)[:, None, None] * distance


def relative_bucket(distance: int, buckets: int, reach: int, two_sided: bool) -> int:
    """The bucket of q - kv = distance (Raffel et al. 2020, section 2.1, and the code of their models).

    Half of the buckets count distances one by one; in the others the distance grows in equal factors up to `reach`.
    Two-sided: keys after the query have the upper half of all buckets; one-sided: they count as distance 0.
    """
    if two_sided:
        side = buckets // 2
        return (side if distance < 0 else 0) + relative_bucket(abs(distance), side, reach, False)
    distance, exact = max(distance, 0), buckets // 2
    if distance < exact:
        return distance
    # A little is added before rounding down: the logarithms of exact powers are exact only in the mathematics.
    share = math.log(distance / exact) / math.log(reach / exact)
    return min(exact + math.floor(share * (buckets - exact) + 1e-9), buckets - 1)


def relative(q_positions: Array, kv_positions: Array, table: Array, reach: int, two_sided: bool) -> Array:
    """table [R N] looked up by the bucket of q - kv: [B N T S]."""
    q, kv, table = np.asarray(q_positions), np.asarray(kv_positions), f64(table)
    out = np.zeros((len(q), table.shape[1], q.shape[1], kv.shape[1]))
    for b, t, s in np.ndindex(len(q), q.shape[1], kv.shape[1]):
        out[b, :, t, s] = table[relative_bucket(int(q[b, t] - kv[b, s]), len(table), reach, two_sided)]
    return out


# Layers ---------------------------------------------------------------------------------------------------------------


def layernorm(x: Array, scale: Array, bias: Array | None, eps: float) -> Array:
    """(x - mean) / sqrt(variance + eps) * scale + bias (Ba et al. 2016, equations 3 and 4); biased variance."""
    x = f64(x)
    centred = x - x.mean(-1, keepdims=True)
    y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * f64(scale)
    return y if bias is None else y + f64(bias)


def rmsnorm(x: Array, scale: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * scale (Zhang and Sennrich 2019, equation 4)."""
    x = f64(x)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * f64(scale)


def relu(x: Array) -> Array:
    return np.maximum(f64(x), 0.0)


def gelu(x: Array) -> Array:
    """x * Phi(x), Phi the standard normal distribution function (Hendrycks and Gimpel 2016, section 2)."""
    x = f64(x)
    return x * 0.5 * (1.0 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2.0)))


def gelu_tanh(x: Array) -> Array:
    """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel 2016, section 2)."""
    x = f64(x)
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def silu(x: Array) -> Array:
    """x * sigmoid(x) (Hendrycks and Gimpel 2016; Ramachandran et al. 2017, where it is Swish with beta 1)."""
    x = f64(x)
    return x * 0.5 * (1.0 + np.tanh(0.5 * x))  # sigmoid(x) = (1 + tanh(x/2)) / 2, which cannot overflow


ACTIVATIONS = {"relu": relu, "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu}


def dense(x: Array, p: Params, equation: str) -> Array:
    """x times p["kernel"] by an einsum, plus p["bias"] where there is one."""
    y = np.einsum(equation, f64(x), f64(p["kernel"]))
    return y + f64(p["bias"]) if "bias" in p else y


def mlp(x: Array, p: Params, activation: str) -> Array:
    """down(act(up(x))), or down(act(gate(x)) * up(x)) where p has a gate_proj, x [B T D].

    Vaswani et al. 2017, equation 2; gated: Shazeer 2020, equations 5 and 6.
    """
    act, up = ACTIVATIONS[activation], dense(x, p["up_proj"], "BTD,DF->BTF")
    inner = act(dense(x, p["gate_proj"], "BTD,DF->BTF")) * up if "gate_proj" in p else act(up)
    return dense(inner, p["down_proj"], "BTF,FD->BTD")


# Whole models: config is a plain dict with the fields of Config, params a nested dict of arrays -----------------------


def norm(x: Array, p: Params, config: Params) -> Array:
    if config["norm"] == "rmsnorm":
        return rmsnorm(x, p["scale"], config["norm_eps"])
    return layernorm(x, p["scale"], p.get("bias"), config["norm_eps"])


def of_layer(pattern: Any, i: int) -> Any:
    """The entry of layer i in a pattern that repeats over the layers, or what is the same in all of them."""
    return pattern[i % len(pattern)] if isinstance(pattern, list | tuple) else pattern


def multi_head(
    x: Array,
    y: Array,
    p: Params,
    config: Params,
    x_positions: Array,
    y_positions: Array,
    ok: Array,
    bias: Array | None = None,
    layer: int = 0,
) -> Array:
    """Multi-head attention with queries from x [B T D], keys and values from y [B S D] (Vaswani et al. 2017, 3.2.2).

    qk_norm: each head of q and k is normalised before it is turned (Henry et al. 2020; Gemma 3 and Qwen 3, 2025).
    """
    q = dense(x, p["q_proj"], "BTD,DNH->BTNH")
    k, v = (dense(y, p[name], "BSD,DKH->BSKH") for name in ("k_proj", "v_proj"))
    if config["qk_norm"]:
        q, k = norm(q, p["q_norm"], config), norm(k, p["k_norm"], config)
    if config["positions"] == "rotary":
        how = of_layer(config["rotary"], layer)
        turns, magnitude = rotary_frequencies(how, how["width"] or q.shape[-1])
        q, k = (rotary(h, at, frequencies=turns, magnitude=magnitude) for h, at in ((q, x_positions), (k, y_positions)))
    scale = config["attention_scale"] or q.shape[-1] ** -0.5
    z = attention(q, k, v, ok, bias, scale=scale, softcap=config["softcap"])
    return dense(z, p["o_proj"], "BTNH,NHD->BTD")


def score_bias(params: Params, config: Params, positions: Array, causal: bool) -> Array | None:
    """What a stack adds to the scores of its self-attention, [B N T T]."""
    if config["positions"] == "alibi":
        return alibi(positions, positions, config["num_heads"])
    if config["positions"] == "relative":
        table = params["relative_bias"]["embedding"]
        return relative(positions, positions, table, config["relative_reach"], two_sided=not causal)
    return None


def block(
    x: Array,
    p: Params,
    config: Params,
    positions: Array,
    ok: Array,
    bias: Array | None = None,
    layer: int = 0,
    source: tuple[Array, Array, Array] | None = None,
) -> Array:
    """Self-attention, cross-attention if there is a source, then the feed-forward layer, with norms and residuals.

    source: hidden states [B S D], positions [B S], and who sees whom. Cross-attention knows no positions.

    post: norm(x + f(x)) (Vaswani et al. 2017, section 3.1). pre: x + f(norm(x)) (Xiong et al. 2020, table 1).
    sandwich: x + norm'(f(norm(x))) (Ding et al. 2021, "CogView", section 2.4; Gemma 2). parallel: x + attn(norm(x)) +
    mlp(norm'(x)) (Black et al. 2022, "GPT-NeoX-20B", section 2.1.2).
    """
    sublayers = {
        "attn": lambda h: multi_head(h, h, p["attn"], config, positions, positions, ok, bias, layer),
    }
    if source is not None:
        memory, at, seen = source
        plain = {**config, "positions": "none"}
        sublayers["cross"] = lambda h: multi_head(h, memory, p["cross"], plain, positions, at, seen)
    sublayers["mlp"] = lambda h: mlp(h, p["mlp"], config["activation"])
    if config["residual"] == "parallel":
        return x + sum(f(norm(x, p[f"{name}_norm"], config)) for name, f in sublayers.items())
    for name, f in sublayers.items():
        if config["residual"] == "pre":
            x = x + f(norm(x, p[f"{name}_norm"], config))
        elif config["residual"] == "sandwich":
            x = x + norm(f(norm(x, p[f"{name}_norm"], config)), p[f"{name}_out_norm"], config)
        else:
            x = norm(x + f(x), p[f"{name}_norm"], config)
    return x


def embed(p: Params, config: Params, ids: Array, positions: Array, token_types: Any = None, table: Any = None) -> Array:
    """Token vectors, times sqrt(D) with embed_scale (Vaswani et al. 2017, section 3.4), plus position vectors.

    Then the vectors of token types (Devlin et al. 2019, figure 2), a norm (Dettmers et al. 2022, section 2.3), and the
    projection of a narrower table (Lan et al. 2020, "ALBERT", section 3.1). table: of another stack.
    """
    x = f64(p["token"]["embedding"] if table is None else table)[np.asarray(ids)]
    if config["embed_scale"]:
        x = x * math.sqrt(config["d_model"])
    if config["positions"] == "learned":  # padding reads row 0: any finite vector does
        x = x + f64(p["position"]["embedding"])[np.maximum(positions, 0)]
    if config["positions"] == "sinusoidal":
        x = x + sinusoidal(positions, x.shape[-1])
    if config["positions"] == "sinusoidal_halves":
        x = x + sinusoidal_halves(positions, x.shape[-1])
    if "type" in p:
        x = x + f64(p["type"]["embedding"])[np.zeros_like(ids) if token_types is None else np.asarray(token_types)]
    if config["embed_norm"]:
        x = norm(x, p["norm"], config)
    return dense(x, p["proj"], "BTE,ED->BTD") if "proj" in p else x


def head(hidden: Array, params: Params, config: Params, table: Any = None) -> Array:
    """Logits of final hidden states: the embedding matrix again if tied (Press and Wolf 2017), scale, bias and cap.

    masked_lm: one more layer and a norm before (Devlin et al. 2019, in the published code).
    """
    p = params.get("lm_head", {})
    if config.get("head") == "masked_lm":
        hidden = ACTIVATIONS[config["activation"]](dense(hidden, p["transform_proj"], "BTD,DE->BTE"))
        hidden = norm(hidden, p["transform_norm"], config)
    if config["tie_embeddings"]:
        logits = hidden @ f64(params["embed"]["token"]["embedding"] if table is None else table).T
    else:
        logits = hidden @ f64(p["kernel"])
    logits = logits * (config["logit_scale"] or 1.0)
    if config["head_bias"]:
        logits = logits + f64(p["bias"])
    cap = config["logit_softcap"]  # Gemma Team 2024, "Gemma 2", section 2
    return logits if cap is None else cap * np.tanh(logits / cap)


def stack(
    x: Array,
    p: Params,
    config: Params,
    positions: Array,
    segments: Any = None,
    *,
    causal: bool,
    prefix: Any = None,
    source: Any = None,
) -> list[Array]:
    """The residual stream before and after each layer, and last the final hidden states."""
    bias = score_bias(p, config, positions, causal)
    streams = [x]
    for i in range(config["num_layers"]):
        window = of_layer(config["window"], i)
        ok = allowed(positions, positions, segments, segments, causal=causal, window=window, prefix=prefix)
        own = i * (config["num_distinct_layers"] or config["num_layers"]) // config["num_layers"]  # Lan et al. 2020
        streams.append(block(streams[-1], p[f"layers_{own}"], config, positions, ok, bias, i, source))
    has_norm = config["residual"] != "post" if config["final_norm"] is None else config["final_norm"]
    return [*streams, norm(streams[-1], p["final_norm"], config) if has_norm else streams[-1]]


def _positions(ids: Array, positions: Any, segments: Any) -> Array:
    """0, 1, 2, ... within each segment, or from the first token on where segments is None too."""
    if positions is not None:
        return np.asarray(positions)
    if segments is not None:
        return positions_from_segments(segments)
    return np.tile(np.arange(ids.shape[1]), (len(ids), 1))


def decoder(
    params: Params,
    config: Params,
    ids: Array,
    positions: Any = None,
    segments: Any = None,
    *,
    prefix: Any = None,
    with_streams: bool = False,
) -> Any:
    """Logits [B T V] of a decoder-only language model; only those at positions >= 0 mean anything.

    with_streams: also returns the residual stream [L+1 B T D], after the embedding and each layer (no final norm).
    """
    ids = np.asarray(ids)
    positions = _positions(ids, positions, segments)
    x = embed(params["embed"], config, ids, positions)
    *streams, hidden = stack(x, params["decoder"], config, positions, segments, causal=True, prefix=prefix)
    logits = head(hidden, params, config)
    return (logits, np.stack(streams)) if with_streams else logits


def encoder(
    params: Params, config: Params, ids: Array, positions: Any = None, segments: Any = None, token_types: Any = None
) -> Array:
    """What the head of a two-sided model makes of its hidden states (Devlin et al. 2019, section 3).

    pooler: tanh of a dense layer on the first token; classifier: a linear map of that; token_classifier: of each token.
    """
    ids = np.asarray(ids)
    positions = _positions(ids, positions, segments)
    x = embed(params["embed"], config, ids, positions, token_types)
    x = stack(x, params["encoder"], config, positions, segments, causal=False)[-1]
    if config["head"] in ("lm", "masked_lm"):
        return head(x, params, config)
    if config["head"] in ("pooler", "classifier"):
        p = params["pooler"] if config["head"] == "pooler" else params["classifier"]["pooler"]
        first = np.stack([x[b, list(positions[b]).index(0)] for b in range(len(x))])
        x = np.tanh(dense(first, p["pooler_proj"], "BD,DO->BO"))
    if config["head"] == "classifier":
        return dense(x, params["classifier"]["label_proj"], "BD,DY->BY")
    if config["head"] == "token_classifier":
        return dense(x, params["classifier"]["label_proj"], "BTD,DY->BTY")
    return x


def encoder_decoder(
    params: Params,
    config: Params,
    ids: Array,
    target_ids: Array,
    positions: Any = None,
    target_positions: Any = None,
    segments: Any = None,
    target_segments: Any = None,
) -> Array:
    """Logits [B T V] of each target token given those before it and the source (Vaswani et al. 2017, figure 1)."""
    ids, target_ids = np.asarray(ids), np.asarray(target_ids)
    positions, at = _positions(ids, positions, segments), _positions(target_ids, target_positions, target_segments)
    x = embed(params["embed"], config, ids, positions)
    memory = stack(x, params["encoder"], config, positions, segments, causal=False)[-1]
    own = config["target_vocab_size"] is not None
    table = params["target_embed" if own else "embed"]["token"]["embedding"]
    y = embed(params.get("target_embed", {}), config, target_ids, at, table=table)
    source = memory, positions, allowed(at, positions, target_segments, segments)
    layers = {**config, "num_layers": config["num_decoder_layers"] or config["num_layers"]}
    hidden = stack(y, params["decoder"], layers, at, target_segments, causal=True, source=source)[-1]
    return head(hidden, params, config, table)


def greedy(params: Params, config: Params, ids: Array, steps: int) -> Array:
    """The `steps` most likely next tokens [B steps] of unpadded prompts, each from a full forward pass (no cache)."""
    ids = np.asarray(ids)
    for _ in range(steps):
        following = decoder(params, config, ids)[:, -1].argmax(-1)
        ids = np.concatenate([ids, following[:, None]], axis=1)
    return ids[:, ids.shape[1] - steps :]


# Loss -----------------------------------------------------------------------------------------------------------------


def logsumexp(row: Array) -> float:
    return float(row.max() + math.log(np.exp(row - row.max()).sum()))


def cross_entropy(
    logits: Array, labels: Array, weights: Array, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> float:
    """Sum of weighted token losses over the sum of the weights; 0 where nothing has weight.

    A token's loss is -sum_v q_v log p_v + z_loss * logsumexp(logits)^2 with q = (1 - e) onehot + e / V. The label of a
    token without weight is never read. Smoothing e: Szegedy et al. 2016, section 7; z-loss: Chowdhery et al. 2022,
    "PaLM", section 5.
    """
    logits, labels, weights, total = f64(logits), np.asarray(labels), f64(weights), 0.0
    for at in np.ndindex(*weights.shape):
        if weights[at] == 0:
            continue
        row, V = logits[at], logits.shape[-1]
        log_z = logsumexp(row)
        target = np.full(V, label_smoothing / V)
        target[labels[at]] += 1.0 - label_smoothing
        total += weights[at] * (target @ (log_z - row) + z_loss * log_z**2)
    return float(total / weights.sum()) if weights.any() else 0.0


# Sampling: logits [... V] -> logits with -inf for what is excluded; softmax() of the result is the distribution -------


def ranked(row: Array) -> list[int]:
    """Token ids from most to least likely, equal ones by id."""
    return sorted(range(len(row)), key=lambda token: (-row[token], token))


def keep(row: Array, tokens: list[int]) -> Array:
    out = np.full(len(row), -np.inf)
    out[tokens] = row[tokens]
    return out


def temperature(logits: Array, t: Any) -> Array:
    """logits / t, t a number or one per row; t = 0 keeps the most likely token only (Holtzman et al. 2020, 3.3)."""
    logits = f64(logits)
    t = np.broadcast_to(f64(t), logits.shape[:-1])
    out = np.zeros_like(logits)
    for at in np.ndindex(*t.shape):
        out[at] = keep(logits[at], ranked(logits[at])[:1]) if t[at] == 0 else logits[at] / t[at]
    return out


def top_k(logits: Array, k: int) -> Array:
    """Keeps exactly the k most likely tokens (all, if k is at least V); equal ones by lower id (Fan et al. 2018)."""
    return np.apply_along_axis(lambda row: keep(row, ranked(row)[:k]), -1, f64(logits))


def top_p(logits: Array, p: float) -> Array:
    """Keeps the smallest set of most likely tokens whose mass reaches p, one at least (Holtzman et al. 2020, 3.1).

    p = 1 keeps every token. Where a mass equals p up to rounding, float32 code may rightly keep another set.
    """

    def nucleus(row: Array) -> Array:
        probs, tokens = softmax(row), ranked(row)
        kept, mass = tokens[:1], probs[tokens[0]]
        for token in tokens[1:]:
            if mass >= p and p < 1:
                break
            kept, mass = [*kept, token], mass + probs[token]
        return keep(row, kept)

    return np.apply_along_axis(nucleus, -1, f64(logits))


# Optimisation ---------------------------------------------------------------------------------------------------------


def adamw(
    x: Array, grad: Array, m: Array, v: Array, step: int, *, lr: float, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0
) -> tuple[Array, Array, Array]:
    """One update of one array: new (x, m, v). The first step is number 1; m and v start at 0.

    Loshchilov and Hutter 2019, algorithm 2, with alpha = 1 and lr as eta: it multiplies the decay too.
    """
    x, grad = f64(x), f64(grad)
    m = b1 * f64(m) + (1 - b1) * grad
    v = b2 * f64(v) + (1 - b2) * grad**2
    m_hat, v_hat = m / (1 - b1**step), v / (1 - b2**step)
    return x - lr * (m_hat / (np.sqrt(v_hat) + eps) + weight_decay * x), m, v


def warmup_cosine(step: int, *, peak: float, warmup: int, total: int, final_fraction: float = 0.0) -> float:
    """Linear from 0 to peak over `warmup` steps, half a cosine down to final_fraction * peak at `total`, then flat.

    Loshchilov and Hutter 2017, "SGDR", equation 5 with one period.
    """
    if step < warmup:
        return peak * step / warmup
    if step >= total:
        return peak * final_fraction
    cosine = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))
    return peak * (final_fraction + (1 - final_fraction) * cosine)


def global_norm(tree: Any) -> float:
    """Euclidean norm over all the arrays of a nested dict taken as one vector."""
    if isinstance(tree, dict):
        return math.sqrt(sum(global_norm(leaf) ** 2 for leaf in tree.values()))
    return math.sqrt((f64(tree) ** 2).sum())


def clip_by_global_norm(tree: Any, max_norm: float) -> Any:
    """Scales every array by max_norm / norm if the global norm exceeds it (Pascanu et al. 2013, algorithm 1)."""
    factor = max_norm / max(global_norm(tree), max_norm)

    def scaled(t: Any) -> Any:
        return {name: scaled(leaf) for name, leaf in t.items()} if isinstance(t, dict) else f64(t) * factor

    return scaled(tree)


def beam_search(
    logprobs: Any,
    prompt: list[int],
    steps: int,
    beams: int,
    eos: tuple[int, ...] = (),
    penalty: float = 1.0,
    only_finished: bool = False,
) -> list[tuple[float, float, list[int]]]:
    """(score, log-probability, new tokens) of the `beams` best texts (Wu et al. 2016, section 7, without coverage).

    logprobs: a function from a text to the log-probabilities [V] of its next token. No search ends early.
    """
    unfinished, finished = [(0.0, [])], []
    for _ in range(steps):
        longer = [
            (total + p, [*text, token])
            for total, text in unfinished
            for token, p in enumerate(logprobs([*prompt, *text]))
        ]
        longer.sort(reverse=True)
        finished += [pair for pair in longer[:beams] if pair[1][-1] in eos]
        unfinished = [pair for pair in longer if pair[1][-1] not in eos][:beams]
    ranked = [
        (total / len(text) ** penalty, total, text)
        for total, text in [*finished, *([] if only_finished else unfinished)]
    ]
    return sorted(ranked, reverse=True)[:beams]
