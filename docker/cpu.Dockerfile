# Paceline without a GPU.
#   docker build -f docker/cpu.Dockerfile -t paceline:cpu .
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/work" paceline:cpu demo
# The lab makes virtual hosts with shaped links, for which it needs root and two capabilities:
#   docker run --rm --user root --cap-add NET_ADMIN --cap-add SYS_ADMIN -v "$PWD:/work" paceline:cpu demo
# Without them the demonstration's ranks share one host. To fetch torch without CUDA, name the index of
# its CPU builds with --build-arg TORCH_INDEX=...
ARG BASE=python:3.12-slim@sha256:78387bc3881b8273120a12ebe6c1ab22b018ccc2c9adf565ae1ac9b536e184ea

FROM ${BASE} AS build
WORKDIR /source
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt hatchling \
    && python -m hatchling build --target wheel --directory /dist

FROM ${BASE}
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends iproute2 iptables iputils-ping util-linux \
    && rm -rf /var/lib/apt/lists/*
COPY constraints.txt /constraints.txt
ARG TORCH_INDEX=""
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --constraint /constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
COPY --from=build /dist /dist
RUN pip install --no-cache-dir --constraint /constraints.txt /dist/*.whl && rm -r /dist \
    && useradd --create-home --uid 1000 paceline
USER paceline
WORKDIR /work
ENTRYPOINT ["paceline"]
CMD []
