# CPU image of the whole project. It was not built here: no machine with Docker was at hand.
#
#     docker build --tag dlrm .
#     docker run --rm --shm-size=1g --volume dlrm:/data dlrm dlrm end_to_end configs/demo.yaml
FROM python:3.11
RUN apt-get update && apt-get install --yes --no-install-recommends make git g++ && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home dlrm && mkdir /data && chown dlrm /data
WORKDIR /app
COPY --chown=dlrm . .
RUN chown dlrm /app
USER dlrm
RUN make setup
ENV PATH=/app/.venv/bin:$PATH DLRM_HOME=/data
VOLUME /data
CMD ["dlrm", "--help"]
