"""Tests of export, import and generation from checkpoints."""

import dataclasses
import json
import pathlib

import pytest
import torch

from paceline.checkpoint.restore import load_step
from paceline.checkpoint.state import load_training_state
from paceline.cli.main import main
from paceline.core.specs import ModelShape
from paceline.models import TransformerLM
from paceline.models.hugging_face import read_weights
from paceline.training.exchange import export_model, import_model, open_saved_model
from paceline.training.toml_config import decode_config
from tests.unit.checkpoint.runs import save_steps
from tests.unit.data.s3_server import s3_server
from tests.unit.training.small_models import SHAPE, save_run


@pytest.mark.parametrize("shape", [SHAPE, dataclasses.replace(SHAPE, tied_embeddings=True)])
def test_export_and_import_keep_every_bit(
    shape: ModelShape, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_run(tmp_path / "run", shape)
    out, back, twice = (str(tmp_path / name) for name in ("out", "back", "twice"))
    assert main(["checkpoint", "export", str(tmp_path / "run"), "--out", out]) == 0
    assert "step 10 as LlamaForCausalLM, float32" in capsys.readouterr().out
    assert main(["checkpoint", "import", out, "--out", back]) == 0
    config = decode_config(capsys.readouterr().out)
    assert config.out == back
    assert config.model.shape == dataclasses.replace(shape, head_dim=shape.head_width)
    assert main(["checkpoint", "verify", f"{back}/checkpoints"]) == 0
    assert main(["checkpoint", "export", back, "--out", twice]) == 0
    names = sorted(path.name for path in pathlib.Path(out).iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    for name in names:
        first, second = (pathlib.Path(place) / name for place in (out, twice))
        assert first.read_bytes() == second.read_bytes(), name


def test_transformers_loads_what_was_exported(tmp_path: pathlib.Path) -> None:
    transformers = pytest.importorskip("transformers", reason="checks against transformers")
    model = save_run(tmp_path / "run")
    saved = open_saved_model(str(tmp_path / "run"))
    export_model(saved, tmp_path / "out", max_shard_bytes=30_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "Naïve tokens, 你好."
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert ids[0].tolist() == list(text.encode())
    assert tokenizer.decode(ids[0]) == text
    assert tokenizer.eos_token_id == theirs.config.eos_token_id == 255
    with torch.no_grad():
        ours, expected = model(ids), theirs(ids).logits
    assert (ours - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_step_and_a_dtype_can_be_chosen(tmp_path: pathlib.Path) -> None:
    save_run(tmp_path / "run", steps=(10, 20))
    first = open_saved_model(str(tmp_path / "run" / "checkpoints"), step=10)
    assert first.tokenizer_json is not None
    config = export_model(first, tmp_path / "out", dtype="bfloat16")
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    rounded = read_weights(tmp_path / "out")["model.norm.weight"]
    assert rounded.dtype == torch.bfloat16
    assert open_saved_model(str(tmp_path / "run")).step == 20
    embedding = first.read(["embedding.weight"])["embedding.weight"]
    written = read_weights(tmp_path / "out")["model.embed_tokens.weight"]
    assert torch.equal(written, embedding.bfloat16())


def test_rounded_weights_are_trained_in_full_precision(tmp_path: pathlib.Path) -> None:
    model = save_run(tmp_path / "run")
    export_model(open_saved_model(str(tmp_path / "run")), tmp_path / "out", dtype="bfloat16")
    import_model(tmp_path / "out", tmp_path / "back")
    assert open_saved_model(str(tmp_path / "back")).tensors["head.weight"].dtype == torch.bfloat16
    again = TransformerLM(SHAPE)
    load_step(tmp_path / "back" / "checkpoints", 0, lambda s: load_training_state(s, again, {}))
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor.bfloat16().float()), name


def test_checkpoints_in_a_bucket_are_exported(tmp_path: pathlib.Path) -> None:
    with s3_server() as bucket:
        save_run(f"{bucket}/run")
        export_model(open_saved_model(f"{bucket}/run/checkpoints"), tmp_path / "remote")
    save_run(tmp_path / "run")
    export_model(open_saved_model(str(tmp_path / "run")), tmp_path / "local")
    for file in (tmp_path / "local").iterdir():
        assert (tmp_path / "remote" / file.name).read_bytes() == file.read_bytes(), file.name


def test_a_damaged_checkpoint_is_not_exported(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_run(tmp_path / "run")
    (file,) = (tmp_path / "run" / "checkpoints").glob("*/*.safetensors")
    content = bytearray(file.read_bytes())
    content[len(content) // 2 :] = b"?" * (len(content) - len(content) // 2)
    file.write_bytes(content)
    out = tmp_path / "out"
    assert main(["checkpoint", "export", str(tmp_path / "run"), "--out", str(out)]) == 1
    assert "is corrupted" in capsys.readouterr().err
    assert not out.exists()


def test_what_cannot_be_exported_or_imported_is_said(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--out", str(tmp_path / "out"))

    def error(*arguments: str) -> str:
        assert main(["checkpoint", *arguments]) != 0
        return capsys.readouterr().err

    assert "no complete checkpoint" in error("export", str(tmp_path / "nowhere"), *out)
    save_run(tmp_path / "run")
    message = error("export", str(tmp_path / "run"), *out, "--step", "30")
    assert "no checkpoint of step 30" in message
    save_steps(tmp_path / "other", [10])
    assert "does not record its model" in error("export", str(tmp_path / "other"), *out)
    assert "config.json: no such file" in error("import", str(tmp_path / "run"), *out)
    assert "already exists" in error("import", str(tmp_path), "--out", str(tmp_path / "run"))


def test_checkpoints_without_a_tokenizer_are_exported_without(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_run(tmp_path / "run")
    (tmp_path / "run" / "tokenizer.json").unlink()
    assert main(["checkpoint", "export", str(tmp_path / "run"), "--out", str(tmp_path / "o")]) == 0
    assert "has no tokenizer" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "o").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    assert json.loads((tmp_path / "o" / "config.json").read_text())["eos_token_id"] == 255


PROMPT = "So it goes. 你"


def _generate(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["generate", *arguments]) == 0
    return capsys.readouterr().out


def _likeliest(model: TransformerLM, prompt: str, number: int) -> str:
    tokens = torch.tensor(list(prompt.encode()))
    for _ in range(number):
        tokens = torch.cat([tokens, model(tokens[None])[0, -1].argmax()[None]])
    return bytes(tokens.tolist()).decode(errors="replace")


def test_it_says_what_the_model_says(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_run(tmp_path / "run", steps=(10, 20))
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    greedy = ("--prompt", PROMPT, "--tokens", "30", "--temperature", "0")
    text = _generate(capsys, run, *greedy)
    assert text == f"{_likeliest(model, PROMPT, 30)}\n"
    assert _generate(capsys, run, *greedy, "--step", "10") != text
    assert main(["checkpoint", "export", run, "--out", out]) == 0
    capsys.readouterr()
    assert _generate(capsys, out, *greedy) == text
    answer = json.loads(_generate(capsys, run, *greedy, "--json"))
    assert answer["prompt"] + answer["text"] + "\n" == text
    assert (answer["step"], answer["num_tokens"]) == (20, 30)


def test_chance_has_a_seed(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_run(tmp_path / "run")
    drawn = [
        _generate(capsys, str(tmp_path / "run"), "--tokens", "20", "--top-k", "9", "--seed", seed)
        for seed in ("1", "1", "2")
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_what_cannot_be_continued_is_said(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(*arguments: str) -> str:
        assert main(["generate", *arguments]) != 0
        return capsys.readouterr().err

    save_run(tmp_path / "run")
    run = str(tmp_path / "run")
    long = "x" * SHAPE.max_context_length
    assert "fills the model's context" in error(run, "--prompt", long)
    assert "no complete checkpoint" in error(str(tmp_path / "nowhere"))
    assert "--tokens 0" in error(run, "--tokens", "0")
    (tmp_path / "run" / "tokenizer.json").unlink()
    assert "no tokenizer.json" in error(run)
