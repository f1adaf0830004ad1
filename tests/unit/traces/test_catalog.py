import pytest

from paceline.traces.catalog import OpClass, op_class_of


@pytest.mark.parametrize(
    "name",
    [
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "paceline::attention",
        "paceline::attention_backward",
        "attention_forward_kernel",
        "attention_key_value_gradient_kernel",
        "void flash_fwd_kernel<Flash_fwd_kernel_traits>",
    ],
)
def test_attention_is_told_by_its_operators_and_kernels(name: str) -> None:
    assert op_class_of(name) == OpClass.ATTENTION


def test_a_products_name_is_not_taken_for_attention() -> None:
    assert op_class_of("aten::bmm") == OpClass.MATMUL
    assert op_class_of("ampere_sgemm_128x64_tn") == OpClass.MATMUL
