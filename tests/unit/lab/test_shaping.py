import pytest

from paceline.core import UsageError
from paceline.lab import LinkShape
from paceline.lab.shaping import parse_delay, parse_loss, parse_rate


def test_people_write_rates_delays_and_losses() -> None:
    assert parse_rate("2gbit") == 2e9
    assert parse_rate("200 Mbit") == 2e8
    assert parse_delay("5ms") == 0.005
    assert parse_loss("1.5%") == pytest.approx(0.015)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_rate, "2"),
        (parse_rate, "2GB"),
        (parse_rate, "-1gbit"),
        (parse_delay, "5"),
        (parse_loss, "1"),
    ],
)
def test_what_cannot_be_read_says_how_to_write_it(parse: object, text: str) -> None:
    with pytest.raises(UsageError, match="write it like"):
        parse(text)  # type: ignore[operator]


@pytest.mark.parametrize(
    "arguments", [{"rate_bits_per_s": 1e5}, {"delay_s": -1.0}, {"delay_s": 60.0}, {"loss": 1.0}]
)
def test_impossible_links_are_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="a link's"):
        LinkShape(**arguments)


def test_the_bucket_is_small_but_holds_an_offloaded_packet() -> None:
    slow = LinkShape(rate_bits_per_s=2e8).bucket_arguments
    fast = LinkShape(rate_bits_per_s=2e9).bucket_arguments
    assert slow[:5] == ["tbf", "rate", "200000000bit", "burst", "65536b"]
    assert fast[4] == "250000b"
