"""``paceline generate``: generates text with a trained model."""

import dataclasses
import sys
import time
from typing import Annotated

import tyro

from paceline.cli.output import Flat, OutputOptions, print_json, say
from paceline.core.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateCommand:
    """Generate text with a model that Paceline trained, or with a Hugging Face Llama model."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|DIR")]
    """Directory of a run, or of a Hugging Face model."""
    prompt: str = ""
    """Text to continue; if empty, the model begins a document."""
    tokens: int = 128
    """Maximum number of tokens; generation stops earlier at the end of the document."""
    temperature: float = 1.0
    """Sampling temperature; 0 always takes the most likely token."""
    top_k: int | None = None
    """Sample only from the k most likely tokens; by default, from all."""
    seed: int = 0
    """Random seed of the sampling."""
    step: int | None = None
    """Step of the checkpoint; by default, the newest complete checkpoint."""
    output: Flat[OutputOptions]

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise UsageError(f"--tokens {self.tokens} must be at least 1")

    def run(self) -> int:
        """Streams the text to stdout and prints the speed to stderr."""
        import torch

        from paceline.data.tokenizer import TextStream
        from paceline.devices import accelerator
        from paceline.models.generation import generate
        from paceline.training.exchange import load_model

        loaded = load_model(self.model, self.step)
        device = torch.device(accelerator.device_type("auto"))
        prompt = loaded.tokenizer.encode_prompt(self.prompt)
        made = generate(
            loaded.model.to(device),
            torch.tensor(prompt, device=device),
            self.tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            end_of_document=loaded.tokenizer.end_of_document,
            generator=torch.Generator(device).manual_seed(self.seed),
        )
        stream = TextStream(loaded.tokenizer)
        pieces: list[str] = []
        times = [time.perf_counter()]
        self._write(self.prompt)
        for token in made:
            times.append(time.perf_counter())
            pieces.append(stream.add(token))
            self._write(pieces[-1])
        pieces.append(stream.finish())
        self._write(f"{pieces[-1]}\n")
        if self.output.json:
            print_json(
                {
                    "prompt": self.prompt,
                    "text": "".join(pieces),
                    "step": loaded.step,
                    "num_prompt_tokens": len(prompt),
                    "num_tokens": len(times) - 1,
                    "tokens_per_s": _rate(times),
                }
            )
        say(_speed(len(prompt), times))
        return 0

    def _write(self, text: str) -> None:
        if not self.output.json:
            sys.stdout.write(text)
            sys.stdout.flush()


def _rate(times: list[float]) -> float | None:
    """Returns tokens per second, excluding the first token, which includes the prompt."""
    return (len(times) - 2) / (times[-1] - times[1]) if len(times) > 2 else None


def _speed(num_prompt_tokens: int, times: list[float]) -> str:
    from paceline.core.units import format_decimal, format_seconds

    if len(times) == 1:
        return "no tokens generated: the document ends here"
    first = f"{num_prompt_tokens:,} prompt tokens read in {format_seconds(times[1] - times[0])}"
    made = f"{len(times) - 1:,} generated"
    rate = _rate(times)
    return f"{first}, {made}" + ("" if rate is None else f", {format_decimal(rate, 'tokens/s')}")
