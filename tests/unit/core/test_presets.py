import pytest

from paceline.accounting import count_parameters
from paceline.core import UsageError, model_preset
from paceline.core.presets import preset_names, preset_spelling

PARAMETERS = {
    "small": 128_625_408,
    "bytes-6M": 6_425_856,
    "bytes-34M": 33_825_280,
    "words-44M": 43_676_928,
    "medium": 423_183_360,
    "large": 969_411_840,
    "xl": 1_998_235_200,
    "2.7B": 3_406_809_600,
    "10B": 12_832_823_808,
    "xxl": 219_848_638_464,
    "llama3-8B": 8_030_261_248,
    "llama3-70B": 70_553_706_496,
    "llama3-405B": 405_853_388_800,
    "llama2-7B": 6_738_415_616,
    "llama2-13B": 13_015_864_320,
    "llama2-70B": 68_976_648_192,
    "mistral-7B": 7_241_732_096,
    "gpt3-175B": 174_604_259_328,
    "megatron-530B": 529_600_819_200,
    "megatron-1T": 1_008_038_758_400,
}


@pytest.mark.parametrize("name", preset_names())
def test_parameter_counts_to_the_digit(name: str) -> None:
    assert count_parameters(model_preset(name)).total == PARAMETERS[name]


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"'smal'; did you mean 'small'\? known: small, medium"):
        model_preset("smal")
    with pytest.raises(UsageError, match="did you mean 'llama3-8B'"):
        model_preset("Llama3-8b")
    with pytest.raises(UsageError, match="known: small"):
        model_preset("zzz")


def test_a_command_line_need_not_match_the_case() -> None:
    assert preset_spelling("LLAMA3-70b") == "llama3-70B"
    assert preset_spelling("smal") == "smal"
