# Paceline on NVIDIA GPUs: the wheel on top of an image that has CUDA, NCCL and torch.
#   docker build -f docker/cuda.Dockerfile -t paceline:cuda .
#   docker run --rm --gpus all --ipc host --user "$(id -u):$(id -g)" -v "$PWD:/work" paceline:cuda env --self-test
# Not run yet: no GPU was at hand. BASE must have torch 2.10 or newer and Python 3.11 or newer.
ARG BASE=pytorch/pytorch:2.10.0-cuda12.8-cudnn9-runtime@sha256:b85566342b86d13a67712e9315d40cdc2dad7f8d86df1aff3831f80835edbcca
ARG BUILD=python:3.12-slim@sha256:78387bc3881b8273120a12ebe6c1ab22b018ccc2c9adf565ae1ac9b536e184ea

FROM ${BUILD} AS build
WORKDIR /source
COPY . .
# The image's torch stays: what goes with torch is not among the constraints of this image.
RUN pip install --no-cache-dir --constraint constraints.txt hatchling \
    && python -m hatchling build --target wheel --directory /dist \
    && grep --invert-match --extended-regexp '^(torch|triton|cuda-|nvidia-)' constraints.txt > /dist/constraints.txt

# hadolint ignore=DL3006
FROM ${BASE}
COPY --from=build /dist /dist
RUN pip install --no-cache-dir --constraint /dist/constraints.txt /dist/*.whl && rm -r /dist \
    && useradd --create-home --non-unique --uid 1000 paceline
USER paceline
WORKDIR /work
ENTRYPOINT ["paceline"]
CMD []
