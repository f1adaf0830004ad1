"""The courses' questions in order: what each asks, and the sentence that answers it.

The questions paraphrase the hand-outs. To add one, add a `Question` here, and the function that
finds its records and numbers in the module of its subject. A sentence may name every field of the
case and every metric of the records that the function gives to it.
"""

from collections.abc import Mapping

from paceline.course import attention, calculated, parallel, steps
from paceline.course.answers import Question

DELIVERABLES: Mapping[str, str] = {
    "benchmarking_script": "Time of a training step",
    "nsys_profile": "Where a step's time goes",
    "mixed_precision_accumulation": "Sums in low precision",
    "benchmarking_mixed_precision": "Mixed precision",
    "memory_profiling": "Memory of a step",
    "pytorch_attention": "Attention that stores its scores",
    "torch_compile": "Compilation",
    "flash_forward, flash_backward": "FlashAttention-2",
    "flash_benchmarking": "FlashAttention-2 against plain attention",
    "distributed_communication_single_node": "All-reduce",
    "naive_ddp": "Data parallelism, one all-reduce per parameter",
    "minimal_ddp_flat": "One all-reduce for all gradients",
    "ddp_overlap_individual_parameters, ddp_overlap_bucketed": "Communication during backward",
    "ddp_bucketed_benchmarking (equations)": "DDP overhead equation",
    "communication_accounting": "Accounting of a model too large for any device",
    "optimizer_state_sharding": "Sharding the optimizer state (ZeRO)",
    "chinchilla_isoflops": "Scaling laws",
}
"""The problems of the courses in order: the name in the hand-outs, and the title here."""

QUESTIONS: tuple[Question, ...] = (
    Question(
        deliverable="benchmarking_script",
        title="By model",
        asks="How long do forward, backward and optimizer take for each model size, and how much "
        "do repeated steps differ?",
        finds=steps.step_time,
        says="A step of {model} takes {step_time_s}, backward {backward_share} of it, "
        "{backward_ratio} times as long as forward (their FLOPs: {flops_ratio} times); the "
        "optimizer moves {optimizer_bytes_per_s} (memory bandwidth of the device: "
        "{memory_bytes_per_s}). The largest standard deviation is {spread_share} of the median: "
        "{noisiest}.",
        kind="step",
    ),
    Question(
        deliverable="benchmarking_script",
        title="Warm-up",
        asks="How do mean and standard deviation change without warm-up steps, or with one or two?",
        finds=steps.warmup,
        says="After {warmup} warm-up steps, the mean step time is {mean_s} ± {std_s}, and the "
        "first step takes {first_step_time_s}.",
        kind="step",
    ),
    Question(
        deliverable="nsys_profile",
        title="Operators",
        asks="Does a trace agree with the stopwatch? Which operator takes longest in forward and "
        "in backward, and how often is it called? What else takes time, how does the share of "
        "matmuls change in a whole step, and how does softmax compare with attention's matmuls?",
        finds=steps.longest_operator,
        says="{phase}: {operator} takes longest, {own_time_s} ({share}) in {num_calls} calls; "
        "matmuls take {matmul_share} of it, and {all_matmul_share} of all that was traced.",
        also={
            "softmax_to_matmuls": "Softmax takes {softmax_s}, {time_ratio} times as long as the "
            "two matmuls of attention ({matmul_s}), for {softmax_operations} operations per score "
            "instead of {matmul_operations}: {operation_ratio} times as long per operation.",
            "trace_against_expectation": "Forward runs {num_matmuls} matmuls with weights; 7 per "
            "layer and one for the logits make {expected_num_matmuls}. The traced step takes "
            "{traced_step_time_s}, without tracing {step_time_s}.",
        },
        kind="memory_timeline",
    ),
    Question(
        deliverable="mixed_precision_accumulation",
        title="Four sums",
        asks="What is 0.01 added a thousand times, with sum and term in fp32 or fp16, and why?",
        finds=calculated.sums,
        says="The float16 sum is {float16_sum:.4f}: above 8, float16 numbers are "
        "{spacing:.4g} apart, and every addition changes the sum by that instead of "
        "{term:.6f}. The float32 sum of float16 terms is {mixed_sum:.4f}: the float16 number "
        "nearest to 0.01 is {term:.9f}.",
    ),
    Question(
        deliverable="benchmarking_mixed_precision",
        title="Dtypes under autocast",
        asks="Which dtype do parameters, activations, logits, loss and gradients have, and why is "
        "layer norm treated differently?",
        finds=calculated.autocast_dtypes,
        says="The loss is float32, not float16 or bfloat16: cross-entropy is on "
        "autocast's list of operations that run in float32. On CUDA, so is layer norm, because "
        "it sums squares: in float16, 256 squared overflows, and the eight significant bits of "
        "bfloat16 are few for a mean and a variance.",
    ),
    Question(
        deliverable="benchmarking_mixed_precision",
        title="Speed-up",
        asks="How much faster are forward and backward in bf16, by model?",
        finds=steps.low_precision,
        says="Forward and backward of {model} take {ratio} as long in {precision} "
        "as in float32 (ratio of the device's peaks: {peak_ratio}); the optimizer stays in "
        "float32 and takes {optimizer_share} of the step instead of {float32_optimizer_share}.",
        kind="step",
    ),
    Question(
        deliverable="memory_profiling",
        title="Timelines and peaks",
        asks="What does memory look like over a forward pass and over a training step, how does "
        "the peak depend on the context and on the dtype, and what is the largest allocation?",
        finds=steps.peak_memory,
        says="Peak memory of {phase} at context {context} in {precision} is {peak_bytes}; at "
        "context {base_context} in {base_precision} it is {base_peak_bytes}, and the largest "
        "difference is {changed}: {changed_bytes} against {base_changed_bytes}.",
        kind="memory_timeline",
    ),
    Question(
        deliverable="memory_profiling",
        title="The 2.7B model",
        asks="How large is a tensor of the residual stream, and how much memory should a training "
        "step of the 2.7B model take at each context?",
        finds=calculated.course_model_memory,
        says="A tensor of the residual stream is 4 · batch · context · "
        "d_model bytes, {residual_bytes} at context {first_context}. The peak is {first_bytes} "
        "at context {first_context} and {last_bytes} at context {last_context}, where the "
        "attention scores of a layer take {scores_bytes}, a SwiGLU weight {matrix_bytes}. A "
        "profile with the same peak at every context shows only the first step, in which the "
        "optimizer allocates its moments after the activations are freed.",
    ),
    Question(
        deliverable="pytorch_attention",
        title="Time and memory by length",
        asks="How do the times of forward and backward and the memory before backward grow with "
        "the sequence length, and at which length does memory run out?",
        finds=attention.attention_growth,
        says="From {first_context} to {context} tokens at head dim {head_dim} "
        "in {dtype}, the memory saved for backward grows as length^{saved_power}, to "
        "{saved_for_backward_bytes} (by the formula {expected_saved_bytes}), and forward time "
        "as length^{forward_power}, to {forward_time_s}.",
        kind="attention",
    ),
    Question(
        deliverable="pytorch_attention",
        title="A configuration that runs out of memory",
        asks="What is the memory used for, and how can most of it be avoided?",
        finds=calculated.score_memory,
        says="Plain attention saves {saved_bytes} for backward, of which "
        "{probabilities_bytes} are the probabilities; if backward recomputes them tile by "
        "tile, only {tiled_saved_bytes} are saved, {saved_ratio} times less.",
    ),
    Question(
        deliverable="torch_compile",
        title="Attention",
        asks="How much faster is compiled attention?",
        finds=attention.compiled_attention,
        says="At {context} tokens, head dim {head_dim} and {dtype}, compiled "
        "attention takes {ratio} as long as plain attention.",
        kind="attention",
    ),
    Question(
        deliverable="torch_compile",
        title="The whole model",
        asks="How much faster is the compiled model in forward, and in the whole step?",
        finds=steps.compiled_step,
        says="Compiled ({compile}), a step of {model} takes {ratio} as long; forward alone "
        "takes {forward_ratio} as long.",
        kind="step",
    ),
    Question(
        deliverable="flash_forward, flash_backward",
        title="Tiles",
        asks="What do forward and backward compute tile by tile, and what do they save?",
        finds=calculated.tiles,
        says="Forward keeps a running maximum and sum per query, and saves "
        "the output and the logsumexp of each query, from which backward recomputes the "
        "probabilities tile by tile: at length 16384, head dim 64 and bfloat16, "
        "{tiled_saved_bytes} are saved instead of {naive_saved_bytes}. See TiledAttention"
        "Function (PyTorch) and TritonAttentionFunction in paceline.kernels.",
    ),
    Question(
        deliverable="flash_forward, flash_backward",
        title="Triton kernels",
        asks="How many registers, how much shared memory and what occupancy do the kernels have?",
        finds=attention.kernel_resources,
        says="{num_spilling} of {num_kernels} kernels spill registers; {kernel} "
        "for {architecture} uses the most, {registers}. Of {num_multiplying} kernels with "
        "matrix instructions, {lowest_kernel} for {lowest_architecture} has the lowest "
        "roofline ceiling: {ceiling_share} of the peak FLOP/s if nothing is found in the cache.",
        kind="kernel",
    ),
    Question(
        deliverable="flash_benchmarking",
        title="Implementations side by side",
        asks="How long do forward and backward of each implementation take, with a causal mask and "
        "batch 1, by length, head dimension and dtype?",
        finds=attention.fastest_attention,
        says="At {context} tokens, head dim {head_dim} and {dtype}, the "
        "fastest of {num_implementations}, {implementation}, takes {time_s} for forward and "
        "backward and reaches {flops_per_s} (peak of the device: {device_flops_per_s}); "
        "{slowest_implementation} takes {slowest_ratio} as long.",
        kind="attention",
    ),
    Question(
        deliverable="distributed_communication_single_node",
        title="Throughput by size and ranks",
        asks="How long does an all-reduce of 1 MB to 1 GB take on 2, 4 and 6 ranks, and how close "
        "does it come to the rate of the link?",
        finds=parallel.all_reduce,
        says="On {world_size} ranks (processors of a host: {num_processors}), an all-reduce of "
        "{size} reaches a bus bandwidth of {bus_bytes_per_s} (link: {link}; its rate: "
        "{link_bytes_per_s}; share of it: {link_share}).",
        kind="comm",
    ),
    Question(
        deliverable="naive_ddp",
        title="Equality",
        asks="Does training on several ranks give the same weights as training in one process?",
        finds=calculated.equality,
        says="python course/benchmark_naive_ddp.py --model toy trains "
        "for ten steps with different data on each rank, then compares the weights with those "
        "of one process that has seen all the data; tests/distributed/test_data_parallel.py "
        "does the same for every strategy, with frozen and tied parameters, gradient "
        "accumulation, and ranks that begin with different weights.",
    ),
    Question(
        deliverable="naive_ddp",
        title="Cost",
        asks="How long is a step, and how much of it is communication?",
        finds=parallel.exposed_communication,
        says="Of a step of {step_time_s}, {exposed_communication_s} "
        "({exposed_share}) is exposed communication: {num_messages} all-reduces, one per "
        "parameter, after backward, at a bus bandwidth of {bus_bytes_per_s} (link: {link}; its "
        "rate: {link_bytes_per_s}; share of it: {link_share}).",
        kind="ddp",
    ),
    Question(
        deliverable="minimal_ddp_flat",
        title="Cost",
        asks="How does one all-reduce of all gradients compare with one per parameter?",
        finds=parallel.flat_step,
        says="With one all-reduce, which copies all gradients, instead of "
        "{naive_num_messages}, a step takes {ratio} as long, and exposed communication "
        "{exposed_ratio} as long.",
        kind="ddp",
    ),
    Question(
        deliverable="ddp_overlap_individual_parameters, ddp_overlap_bucketed",
        title="Individual parameters and buckets",
        asks="How long is a step when parameters, or buckets of 1 to 1000 MiB, are sent as soon as "
        "their gradients are ready, and does the overlap model predict it?",
        finds=parallel.best_bucket,
        says="Of {num_sizes} bucket sizes, {strategy} has the shortest step, "
        "{step_time_s}: {exposed_communication_s} of communication is exposed, which takes "
        "{communication_s} without overlap. It takes {ratio} as long as the fastest of the "
        "others, {rival_strategy}.",
        also={
            "prediction_error": "The overlap model predicts the exposed communication of "
            "{num_close} of {num_sizes} bucket sizes within {close_share}. It is furthest off at "
            "{strategy}: {predicted_s} predicted, {exposed_communication_s} measured; the "
            "difference is {error_share} of the step."
        },
        kind="ddp",
    ),
    Question(
        deliverable="ddp_overlap_individual_parameters, ddp_overlap_bucketed",
        title="Traces with and without overlap",
        asks="When does a step communicate: during backward, or after it?",
        finds=parallel.overlap_in_trace,
        says="{strategy}: on the rank that waits least, "
        "{exposed_communication_s} of communication is exposed; {overlapped_share} of "
        "{total_s} of communication overlaps with compute.",
        kind="timeline",
    ),
    Question(
        deliverable="ddp_bucketed_benchmarking (equations)",
        title="Overhead and best bucket",
        asks="There are s bytes of gradients, w bytes per second, o seconds per call, and n "
        "buckets; computing a bucket takes as long as sending it. How long does communication go "
        "on after backward, and which bucket size minimises that time?",
        finds=calculated.overhead,
        says="With t = s/(n w), bucket k is ready at k t and its all-reduce "
        "takes t + o; the last one ends at (n + 1) t + n o, backward at n t. The difference, "
        "s/(n w) + n o, is least, {overhead_s}, for {num_buckets} buckets of {bucket_bytes}.",
    ),
    Question(
        deliverable="communication_accounting",
        title="Memory, sharding, and when compute hides communication",
        asks="How much memory do the states and activations of xxl take, over how many devices "
        "must they be sharded, and from which batch size on is forward compute-bound?",
        finds=calculated.large_model_accounting,
        says="(a) The states take {state_gib:,.0f} GiB, "
        "{devices_of_80_gib} H100 before any activations, of which each token adds "
        "{saved_bytes_per_token} bytes. (b) Without activations, {devices_of_95_gib} devices "
        "are enough; 4096 tokens per device need {devices_with_4096_tokens}; from "
        "{most_tokens_per_device:,.0f} on, none are enough, as half of the activations is not "
        "sharded. (c) On 16 by 4 devices (FSDP by tensor), forward is compute-bound from "
        "{batch_tokens_add_fixed:,.0f} tokens on if the axes communicate one after the other, "
        "from {batch_tokens_overlap_fixed:,.0f} on at the same time. (d) With the best split, "
        "from {batch_tokens_add_free:,.0f} or {batch_tokens_overlap_free:,.0f} on; pipeline "
        "stages and all-gathers in lower precision lower that, gradient accumulation and "
        "longer contexts do not.",
    ),
    Question(
        deliverable="optimizer_state_sharding",
        title="Memory at three instants",
        asks="How much memory does a rank hold after initialisation, and before and after the "
        "optimizer step, with and without sharding, and what is it used for?",
        finds=parallel.sharded_memory,
        says="With {strategy} instead of torch_ddp, the peak memory of a rank before the "
        "optimizer step is {peak_before_step_bytes} (predicted: "
        "{predicted_peak_before_step_bytes}) instead of {unsharded_peak_before_step_bytes}, "
        "{peak_share}; the optimizer state takes {before_step_optimizer_state_bytes} instead of "
        "{unsharded_before_step_optimizer_state_bytes}.",
        kind="optimizer",
    ),
    Question(
        deliverable="optimizer_state_sharding",
        title="Time",
        asks="How does sharding change step time?",
        finds=parallel.step_against_unsharded,
        says="On {world_size} ranks, a step with {strategy} takes {step_ratio} as long as "
        "without sharding; the optimizer takes {optimizer_ratio} as long.",
        kind="optimizer",
    ),
    Question(
        deliverable="optimizer_state_sharding",
        title="Accounting, and ZeRO stage 1",
        asks="How much memory do the states of xl take, and how does this sharding differ from "
        "ZeRO stage 1 in memory and in communication volume?",
        finds=calculated.zero_stages,
        says="Sharding the optimizer state reduces the states of xl from "
        "{unsharded_bytes} to {sharded_bytes} per rank. ZeRO stage 1 reduce-scatters gradients "
        "and all-gathers parameters: 2 Ψ, as plain data parallelism; an all-reduce followed by "
        "broadcasts moves 3 Ψ, because every rank also receives averaged gradients that it "
        "does not need. Shards of whole parameters are uneven, those of a flat buffer even.",
    ),
    Question(
        deliverable="chinchilla_isoflops",
        title="The best model and data for a budget",
        asks="From the losses of runs at equal compute, which model size and how many tokens are "
        "best at 1e23 and at 1e24 FLOPs?",
        finds=calculated.best_allocation,
        says="{flops} FLOPs, {extrapolation} times the largest budget of the "
        "runs, are best spent on {parameters} parameters ({parameters_low} to "
        "{parameters_high}) and {tokens} tokens, {tokens_per_parameter} per parameter, by the "
        "{method} method.",
    ),
)
