"""Make the golden models: tiny models of published families with what `transformers` computes from them.

    python tests/golden/make.py [FOLDER] [name ...]        (needs torch and transformers; no network; half a minute)

The files in this folder were made with transformers 5.24.0 and torch 2.13.0, eager attention, float32 on a CPU.

For each name there are config.json and model.safetensors, as `save_pretrained` writes them, and ref.npz, inputs and
what comes out of them. All weights are drawn anew, so that each matters: by the library's own initialisation biases are
0, norms 1 and attention is near uniform, and many a fault would change nothing. They are exact in bfloat16 and stored
so, which keeps the files small; the outputs are those of float32.

ref.npz of a decoder:
    ids [1 T], logits [1 T V]
    hidden [L 1 T D]                 the residual stream before each layer
    left_ids, left_mask [2 T]        two texts, padding left; the second is ids
    left_logits [T-5 V]              logits of the first one's tokens
    right_ids, right_mask, right_logits         padding right
    greedy_ids [1 P+new]             the continuation of ids[:, :P]

ref.npz of an encoder-decoder:
    ids [1 T], target_ids [1 P], logits [1 P V]
    hidden [L 1 T D]                 the residual stream of the encoder before each layer
    memory [1 T D]                   what the encoder makes of ids
    left_ids, left_mask [2 T]        two sources, padding left; the second is ids
    left_logits [P V], left_memory [T-5 D]      of the first one; positions count from the row's begin, as the library's
    right_ids, right_mask, right_logits, right_memory           padding right
    greedy_ids [1 1+new]             the continuation of the token that target texts begin with

ref.npz of an encoder, in the folder `encoders`:
    ids, types [1 T]                 types of tokens, where the model has them
    logits [1 ...]                   what the head makes of ids
    hidden [L+1 1 T D]               the residual stream before each layer, and after the last
    left_ids, left_types, left_mask [2 T]       two texts, padding left; the second is ids
    left_logits [...]                of the first one; only its tokens, where there are logits for each
    right_...                        padding right

ref.npz of `torch/original`, a model around torch.nn.Transformer, whose state dict is state_dict.safetensors:
    ids [2 T], mask [2 T]            two sources, padding right
    target_ids [2 P], logits [2 P V]
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

V, T, PROMPT, NEW, SEED = 56, 16, 8, 8, 20240607
LLAMA = {
    "vocab_size": V,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
GEMMA = LLAMA | {
    "num_attention_heads": 4,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "sliding_window": 5,
    "query_pre_attn_scalar": 12,
    "tie_word_embeddings": True,
}
NEOX = {
    "vocab_size": V,
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 32,
    "hidden_act": "gelu",
    "tie_word_embeddings": False,
}
GPT2 = {"vocab_size": V, "n_positions": 32, "n_embd": 24, "n_layer": 2}


def rope(**fields):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0} | fields}


TIED = {"tie_word_embeddings": True}
BIASES = {"attention_bias": True, "mlp_bias": True}
WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 2.0, "beta_slow": 0.5}
GEMMA3 = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}

DECODERS = {
    "gpt2": ("GPT2", GPT2 | {"n_head": 4}),
    "llama": ("Llama", LLAMA),
    "llama_tied": ("Llama", LLAMA | {"head_dim": 8, "tie_word_embeddings": True} | rope(rope_theta=500000.0)),
    "llama3_rope": ("Llama", LLAMA | {"head_dim": 8} | rope(**LLAMA3, original_max_position_embeddings=16)),
    "llama_linear": ("Llama", LLAMA | BIASES | rope(rope_type="linear", factor=4.0)),
    "llama_yarn": ("Llama", LLAMA | {"head_dim": 16} | rope(**YARN, original_max_position_embeddings=16)),
    "mistral": ("Mistral", LLAMA | {"sliding_window": 5}),
    "qwen2": ("Qwen2", LLAMA | {"tie_word_embeddings": True} | rope(rope_theta=1000000.0)),
    "qwen3": ("Qwen3", LLAMA | {"head_dim": 8} | WINDOWS),
    "gemma2": ("Gemma2", GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}),
    "gemma3": ("Gemma3Text", GEMMA | {"num_hidden_layers": 7, "rope_parameters": GEMMA3}),
    "gpt_neox": ("GPTNeoX", NEOX | rope(partial_rotary_factor=0.25)),
    "gpt_neox_serial": ("GPTNeoX", NEOX | {"use_parallel_residual": False} | rope(partial_rotary_factor=1.0)),
    "gptj": ("GPTJ", GPT2 | {"n_head": 3, "rotary_dim": 4, "n_inner": 48}),
    "phi": ("Phi", NEOX | {"hidden_act": "gelu_new"} | rope(partial_rotary_factor=0.5)),
    "opt": ("OPT", NEOX | {"num_attention_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 24} | TIED),
    "bloom": ("Bloom", {"vocab_size": V, "hidden_size": 24, "n_layer": 2, "n_head": 6}),
    "mpt": ("Mpt", {"vocab_size": V, "d_model": 24, "n_layers": 2, "n_heads": 6, "max_seq_len": 32}),
}
"""Name -> prefix of the config's class, and its fields."""
OWN_POSITIONS = ("bloom", "mpt", "opt")
"""Models that take positions from the mask, or none."""


T5 = {
    "vocab_size": V,
    "d_model": 24,
    "d_kv": 8,
    "d_ff": 40,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "decoder_start_token_id": 0,
}
BART = {
    "vocab_size": V,
    "max_position_embeddings": 32,
    "d_model": 24,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "pad_token_id": 1,
    "decoder_start_token_id": 2,
}
MARIAN = {"activation_function": "swish", "pad_token_id": V - 1, "decoder_start_token_id": V - 1}
ENCODER_DECODERS = {
    "t5": ("T5", T5 | {"feed_forward_proj": "relu"}),
    "t5_v1_1": ("T5", T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "bart": ("Bart", BART),
    "mbart": ("MBart", BART | {"scale_embedding": True}),
    "marian": ("Marian", BART | MARIAN | {"scale_embedding": True}),
}
BERT = {
    "vocab_size": V,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 32,
}
ROBERTA = BERT | {"max_position_embeddings": 34, "type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5}
DISTILBERT = {
    "vocab_size": V,
    "dim": 24,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 40,
    "max_position_embeddings": 32,
}
ALBERT = BERT | {"embedding_size": 16, "num_hidden_layers": 4, "num_hidden_groups": 2}
ENCODERS = {
    "bert": ("Bert", "ForMaskedLM", BERT),
    "bert_model": ("Bert", "Model", BERT),
    "bert_classes": ("Bert", "ForSequenceClassification", BERT | {"num_labels": 3}),
    "bert_tokens": ("Bert", "ForTokenClassification", BERT | {"num_labels": 4}),
    "roberta": ("Roberta", "ForMaskedLM", ROBERTA),
    "roberta_classes": ("Roberta", "ForSequenceClassification", ROBERTA | {"num_labels": 3}),
    "distilbert": ("DistilBert", "ForMaskedLM", DISTILBERT),
    "albert": ("Albert", "ForMaskedLM", ALBERT),
    "albert_classes": ("Albert", "ForSequenceClassification", ALBERT | {"num_labels": 3, "num_hidden_groups": 1}),
}
"""Name -> prefix and suffix of the model's class, and the fields of its config."""


def redraw(model, seed):
    """Draws every parameter, scaled so that activations stay near 1, and rounds it to bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    modules = dict(model.named_modules())
    scaled = model.config.model_type.startswith("gemma")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            module = type(modules[name.rpartition(".")[0]]).__name__
            if "Sinusoidal" in module:
                continue
            x = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                x = 0.2 * x + (0.0 if "bias" in name else parameter)
            elif "Embedding" in module:
                x *= 0.15 if scaled else 0.25
            else:
                x *= 1.2 / parameter.shape[0 if module == "Conv1D" else -1] ** 0.5
            parameter.copy_(x.bfloat16())


def padded(texts, left):
    ids, mask = np.zeros((len(texts), T), np.int64), np.zeros((len(texts), T), np.int64)
    for row, text in enumerate(texts):
        at = slice(T - len(text), None) if left else slice(0, len(text))
        ids[row, at], mask[row, at] = text, 1
    return ids, mask


@torch.no_grad()
def decoder(name, folder):
    kind, fields = DECODERS[name]
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = getattr(transformers, f"{kind}Config")(**fields, **ends)
    seed = SEED + sum(map(ord, name))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    redraw(model, seed)
    draw = np.random.default_rng(seed)
    ids, short = draw.integers(V, size=(1, T)), draw.integers(V, size=T - 5)

    def run(ids, **options):
        return model(torch.from_numpy(ids), use_cache=False, **options)

    out = run(ids, output_hidden_states=True)
    ref = {"ids": ids, "logits": out.logits.numpy()}
    ref["hidden"] = np.stack([hidden.numpy() for hidden in out.hidden_states[:-1]])
    for side in ("left", "right"):
        padded_ids, mask = padded([short, ids[0]], left=side == "left")
        options = {"attention_mask": torch.from_numpy(mask)}
        if name not in OWN_POSITIONS:
            options["position_ids"] = torch.from_numpy(np.maximum(mask.cumsum(1) - 1, 0))
        logits = run(padded_ids, **options).logits.numpy()
        ref |= {f"{side}_ids": padded_ids, f"{side}_mask": mask, f"{side}_logits": logits[0][mask[0] == 1]}
        assert abs(logits[1] - ref["logits"][0]).max() < 1e-4
    greedy = ids[:, :PROMPT]
    for _ in range(NEW):
        greedy = np.concatenate([greedy, run(greedy).logits[:, -1:].argmax(-1).numpy()], axis=1)
    ref["greedy_ids"] = greedy
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return ref


@torch.no_grad()
def encoder_decoder(name, folder):
    kind, fields = ENCODER_DECODERS[name]
    ends = {"bos_token_id": None, "eos_token_id": None}
    config = getattr(transformers, f"{kind}Config")(**fields, **ends)
    seed = SEED + sum(map(ord, name))
    torch.manual_seed(seed)
    model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager").eval()
    if fields.get("tie_word_embeddings") is False:  # the library ties even so, unless a file has both tensors
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    redraw(model, seed)
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.copy_(torch.randn(model.final_logits_bias.shape).bfloat16())
    draw = np.random.default_rng(seed)
    ids, short, target = (draw.integers(V, size=size) for size in ((1, T), T - 5, (1, PROMPT)))

    def run(ids, target, **options):
        inputs = {"input_ids": ids, "decoder_input_ids": np.repeat(target, len(ids), axis=0)} | options
        options = {"use_cache": False, "output_hidden_states": True}
        return model(**{key: torch.from_numpy(x) for key, x in inputs.items()}, **options)

    out = run(ids, target)
    ref = {"ids": ids, "target_ids": target, "logits": out.logits.numpy()}
    ref["hidden"] = np.stack([hidden.numpy() for hidden in out.encoder_hidden_states[:-1]])
    ref["memory"] = out.encoder_last_hidden_state.numpy()
    for side in ("left", "right"):
        padded_ids, mask = padded([short, ids[0]], left=side == "left")
        out = run(padded_ids, target, attention_mask=mask)
        ref |= {f"{side}_ids": padded_ids, f"{side}_mask": mask, f"{side}_logits": out.logits.numpy()[0]}
        ref[f"{side}_memory"] = out.encoder_last_hidden_state.numpy()[0][mask[0] == 1]
    greedy = np.array([[model.config.decoder_start_token_id]])
    for _ in range(NEW):
        greedy = np.concatenate([greedy, run(ids, greedy).logits[:, -1:].argmax(-1).numpy()], axis=1)
    ref["greedy_ids"] = greedy
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return ref


@torch.no_grad()
def encoder(name, folder):
    kind, suffix, fields = ENCODERS[name]
    config = getattr(transformers, f"{kind}Config")(**fields)
    config._attn_implementation = "eager"
    seed = SEED + sum(map(ord, name))
    torch.manual_seed(seed)
    model = getattr(transformers, kind + suffix)(config).eval()
    redraw(model, seed)
    draw = np.random.default_rng(seed)
    # Ids 0 to 3 are padding and the like, from which one of the models makes positions.
    ids, short = draw.integers(4, V, size=(1, T)), draw.integers(4, V, size=T - 5)
    has_types = getattr(config, "type_vocab_size", 0) > 1

    def run(ids, mask):
        options = {"input_ids": ids, "attention_mask": mask} | ({"token_type_ids": ids % 2} if has_types else {})
        if kind != "DistilBert":
            rows = 2 if kind == "Roberta" else 0
            options["position_ids"] = np.maximum(mask.cumsum(1) - 1, 0) + rows
        elif not mask[:, 0].all():  # which has positions of the row's begin only
            return None
        out = model(**{key: torch.from_numpy(x) for key, x in options.items()}, output_hidden_states=True)
        return (out.pooler_output if suffix == "Model" else out.logits).numpy(), out.hidden_states

    logits, hidden = run(ids, np.ones_like(ids))
    ref = {"ids": ids, "logits": logits, "hidden": np.stack([x.numpy() for x in hidden])}
    for side in ("left", "right"):
        padded_ids, mask = padded([short, ids[0]], left=side == "left")
        found = run(padded_ids, mask)
        if found is not None:
            of_short = found[0][0] if found[0].ndim == 2 else found[0][0][mask[0] == 1]
            ref |= {f"{side}_ids": padded_ids, f"{side}_mask": mask, f"{side}_logits": of_short}
    if has_types:
        ref |= {key.replace("ids", "types"): x % 2 for key, x in ref.items() if key.endswith("ids")}
    model.to(torch.bfloat16).save_pretrained(folder)
    return ref


class Original(torch.nn.Module):
    """Two vocabularies, learned positions, and PyTorch's own stacks between them."""

    def __init__(self):
        super().__init__()
        self.source, self.target = torch.nn.Embedding(V, 24), torch.nn.Embedding(V - 6, 24)
        self.places = torch.nn.ModuleList([torch.nn.Embedding(T, 24) for _ in range(2)])
        self.transformer = torch.nn.Transformer(24, 4, 3, 2, 40, batch_first=True)
        self.head = torch.nn.Linear(24, V - 6)

    def forward(self, ids, mask, target_ids):
        x, y = (embed(ids) * 24**0.5 for embed, ids in ((self.source, ids), (self.target, target_ids)))
        x, y = (x + table.weight[: x.shape[1]] for x, table in zip((x, y), self.places, strict=True))
        hidden = mask == 0
        ahead = torch.nn.Transformer.generate_square_subsequent_mask(y.shape[1])
        paddings = {"src_key_padding_mask": hidden, "memory_key_padding_mask": hidden}
        return self.head(self.transformer(x, y, tgt_mask=ahead, tgt_is_causal=True, **paddings))


@torch.no_grad()
def original(name, folder):
    model = Original().train()  # the fast path of eval() is another program; there is no dropout but that of 0
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(module, torch.nn.MultiheadAttention):
            module.dropout = 0.0
    model.config = type("Config", (), {"model_type": "original"})
    redraw(model, SEED)
    draw = np.random.default_rng(SEED)
    ids, mask = padded([draw.integers(V, size=T), draw.integers(V, size=T - 5)], left=False)
    target = draw.integers(V - 6, size=(2, PROMPT))
    logits = model(*map(torch.from_numpy, (ids, mask, target))).numpy()
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: x.bfloat16() for key, x in model.state_dict().items()}, folder / "state_dict.safetensors")
    return {"ids": ids, "mask": mask, "target_ids": target, "logits": logits}


def main(folder, names):
    for name in names or [*DECODERS, *ENCODER_DECODERS, *ENCODERS, "original"]:
        make = decoder if name in DECODERS else encoder_decoder if name in ENCODER_DECODERS else encoder
        make = original if name == "original" else make
        target = folder / {encoder: "encoders", original: "torch"}.get(make, "") / name
        ref = make(name, target)
        small = {key: x.astype(np.int16) if x.dtype == np.int64 else x for key, x in ref.items()}
        np.savez_compressed(target / "ref.npz", **small)
        size = sum(file.stat().st_size for file in target.iterdir())
        last = ref.get("greedy_ids", ref["ids"])[0, PROMPT:]
        print(f"{name:16} {size / 1000:6.1f} KB, logits {ref['logits'].std():.2f}, {last}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent, sys.argv[2:])
