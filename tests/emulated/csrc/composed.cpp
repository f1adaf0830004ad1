// Operators that torch has for accelerators only, composed of others; and gradients of rows, as sparse
// tensors, which are two tensors.
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/clone_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <torch/library.h>

#include "tensors.h"

namespace emulated {
namespace {

using at::Tensor;
using Three = std::tuple<Tensor, Tensor, Tensor>;

// The workspace has the gates after their nonlinearities: input, forget, cell, output.
Three lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& old_cell,
                const std::optional<Tensor>& input_bias, const std::optional<Tensor>& hidden_bias) {
  Tensor gates = input_gates + hidden_gates;
  if (input_bias && input_bias->defined()) gates = gates + *input_bias + *hidden_bias;
  auto parts = gates.chunk(4, 1);
  Tensor in = parts[0].sigmoid(), forget = parts[1].sigmoid(), cell = parts[2].tanh(), out = parts[3].sigmoid();
  Tensor new_cell = forget * old_cell + in * cell;
  return {out * new_cell.tanh(), new_cell, at::cat({in, forget, cell, out}, 1)};
}

Three lstm_cell_backward(const std::optional<Tensor>& grad_hidden, const std::optional<Tensor>& grad_cell,
                         const Tensor& old_cell, const Tensor& new_cell, const Tensor& workspace, bool has_bias) {
  auto parts = workspace.chunk(4, 1);
  const Tensor &in = parts[0], &forget = parts[1], &cell = parts[2], &out = parts[3];
  Tensor squashed = new_cell.tanh();
  Tensor of_hidden = grad_hidden && grad_hidden->defined() ? *grad_hidden : at::zeros_like(new_cell);
  Tensor of_cell = of_hidden * out * (1 - squashed * squashed);
  if (grad_cell && grad_cell->defined()) of_cell = of_cell + *grad_cell;
  Tensor gates = at::cat({of_cell * cell * in * (1 - in), of_cell * old_cell * forget * (1 - forget),
                          of_cell * in * (1 - cell * cell), of_hidden * squashed * out * (1 - out)},
                         1);
  return {gates, of_cell * forget, has_bias ? gates.sum(0) : Tensor()};
}

// The workspace has the gates, the old hidden state, and what the reset gate multiplies.
std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& old_hidden,
                                    const std::optional<Tensor>& input_bias, const std::optional<Tensor>& hidden_bias) {
  bool has_bias = input_bias && input_bias->defined();
  auto given = (has_bias ? input_gates + *input_bias : input_gates).chunk(3, 1);
  auto kept = (has_bias ? hidden_gates + *hidden_bias : hidden_gates).chunk(3, 1);
  Tensor reset = (given[0] + kept[0]).sigmoid(), update = (given[1] + kept[1]).sigmoid();
  Tensor fresh = (given[2] + reset * kept[2]).tanh();
  return {fresh + update * (old_hidden - fresh), at::cat({reset, update, fresh, old_hidden, kept[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad, const Tensor& workspace, bool has_bias) {
  auto parts = workspace.chunk(5, 1);
  const Tensor &reset = parts[0], &update = parts[1], &fresh = parts[2];
  Tensor of_fresh = grad * (1 - update) * (1 - fresh * fresh);
  Tensor of_reset = of_fresh * parts[4] * reset * (1 - reset);
  Tensor of_update = grad * (parts[3] - fresh) * update * (1 - update);
  Tensor given = at::cat({of_reset, of_update, of_fresh}, 1), kept = at::cat({of_reset, of_update, of_fresh * reset}, 1);
  return {given, kept, grad * update, has_bias ? given.sum(0) : Tensor(), has_bias ? kept.sum(0) : Tensor()};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl("_sparse_coo_tensor_with_dims", &at::native::new_with_dims_sparse);
  m.impl("_sparse_coo_tensor_with_dims_and_tensors", &at::native::new_with_dims_and_tensor_sparse_symint);
  m.impl("_indices", &at::native::_indices_sparse);
  m.impl("_values", &at::native::_values_sparse);
  m.impl("_nnz", &at::native::_nnz_sparse);
  m.impl("sparse_dim", &at::native::sparse_dim_sparse);
  m.impl("dense_dim", &at::native::dense_dim_sparse);
  m.impl("is_coalesced", &at::native::is_coalesced_sparse);
  m.impl("_coalesced_", &at::native::_coalesced_sparse_);
  m.impl("clone", &at::native::clone_sparse);
}

}  // namespace
}  // namespace emulated
