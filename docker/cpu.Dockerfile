# Paceline without a GPU.
#   docker build -f docker/cpu.Dockerfile -t paceline:cpu .
#   docker run --rm --cap-add NET_ADMIN --cap-add SYS_ADMIN -v "$PWD:/work" paceline:cpu demo
# The capabilities are the lab's, which makes virtual hosts with shaped links; without them the
# demonstration's ranks share one host. To fetch torch without CUDA, name the index of its CPU builds
# with --build-arg TORCH_INDEX=...
FROM python:3.12-slim AS build
WORKDIR /source
COPY . .
RUN pip install --no-cache-dir hatchling==1.33.0 \
    && python -m hatchling build --target wheel --directory /dist

FROM python:3.12-slim
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends iproute2 iptables iputils-ping util-linux \
    && rm -rf /var/lib/apt/lists/*
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=""
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH"
COPY --from=build /dist /dist
RUN pip install --no-cache-dir /dist/*.whl && rm -r /dist
WORKDIR /work
ENTRYPOINT ["paceline"]
CMD []
