# Paceline on NVIDIA GPUs: the wheel on top of an image that has CUDA, NCCL and torch.
#   docker build -f docker/cuda.Dockerfile -t paceline:cuda .
#   docker run --rm --gpus all --ipc host -v "$PWD:/work" paceline:cuda env --self-test
# Not run yet: no GPU was at hand. BASE must have torch 2.10 or newer and Python 3.11 or newer.
ARG BASE=pytorch/pytorch:2.10.0-cuda12.8-cudnn9-runtime

FROM python:3.12-slim AS build
WORKDIR /source
COPY . .
RUN pip install --no-cache-dir hatchling==1.33.0 \
    && python -m hatchling build --target wheel --directory /dist

# hadolint ignore=DL3006
FROM ${BASE}
COPY --from=build /dist /dist
# The image's torch stays: what is installed already satisfies the wheel's range.
RUN pip install --no-cache-dir /dist/*.whl && rm -r /dist
WORKDIR /work
ENTRYPOINT ["paceline"]
CMD []
