import pytest

from paceline.core import UsageError
from paceline.lab import LabError, LinkShape, hosts, sites
from paceline.lab.network import parse_loss


def test_a_loss_is_a_percentage() -> None:
    assert parse_loss("1.5%") == pytest.approx(0.015)
    with pytest.raises(UsageError, match="write it like 1%"):
        parse_loss("1")


@pytest.mark.parametrize(
    "arguments", [{"rate_bits_per_s": 1e5}, {"delay_s": -1.0}, {"delay_s": 60.0}, {"loss": 1.0}]
)
def test_impossible_links_are_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="a link's"):
        LinkShape(**arguments)


def test_one_site_has_no_uplink() -> None:
    with pytest.raises(UsageError, match="add --sites 2"), sites(1, 2, None, LinkShape(loss=0.1)):
        pass


@pytest.mark.parametrize(("num_sites", "per_site"), [(0, 1), (1, 0), (2, 126), (251, 1)])
def test_the_number_of_hosts_is_limited(num_sites: int, per_site: int) -> None:
    with pytest.raises(LabError, match="1 to 250 hosts"), sites(num_sites, per_site):
        pass


def test_no_hosts_are_refused() -> None:
    with pytest.raises(LabError, match="1 to 250 hosts, not 0"), hosts(0):
        pass


def test_the_bucket_is_small_but_holds_an_offloaded_packet() -> None:
    slow = LinkShape(rate_bits_per_s=2e8).bucket_arguments
    fast = LinkShape(rate_bits_per_s=2e9).bucket_arguments
    assert slow[:5] == ["tbf", "rate", "200000000bit", "burst", "65536b"]
    assert fast[4] == "250000b"
