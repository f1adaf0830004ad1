"""Checkpoints under a prefix of an S3 bucket.

Objects cannot be renamed, so an attempt's files have their final names from the start, under the
attempt's id. A step exists once its manifest does, and the manifest is created only if absent.
"""

from collections.abc import Iterable

from paceline.data.storage import Storage
from paceline.data.storage.s3 import S3Storage
from paceline.training.checkpoint.errors import CheckpointError
from paceline.training.checkpoint.format.manifest import MANIFEST, decode_manifest
from paceline.training.checkpoint.places.names import parse_step, step_name


class BucketPlace:
    """Checkpoints under a prefix.

    Args:
        storage: Storage of the bucket and the prefix.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    @property
    def url(self) -> str:
        """URL of the bucket and the prefix."""
        return self._storage.url

    @property
    def is_shared(self) -> bool:
        """True: there is one bucket."""
        return True

    def steps(self) -> list[int]:
        """Returns the steps that have a manifest, newest first."""
        return sorted(_published(self._storage.sizes()), reverse=True)

    def storage(self, step: int) -> Storage:
        """Returns the objects of a step."""
        return S3Storage(f"{self.url}/{step_name(step)}")

    def begin(self, step: int, save_id: str) -> None:
        """Raises if the step already exists."""
        if step in self.steps():
            raise CheckpointError(
                f"{self.url}/{step_name(step)} already exists, and checkpoints are never "
                "overwritten; remove it, or name another place"
            )

    def write(self, step: int, save_id: str, name: str, parts: Iterable[bytes | memoryview]) -> str:
        """Uploads an object, which is held in memory as a whole."""
        own_name = f"{save_id}/{name}"
        content = bytearray()
        for part in parts:
            content += part
        self._storage.write(f"{step_name(step)}/{own_name}", content)
        return own_name

    def sizes(self, step: int, save_id: str) -> dict[str, int]:
        """Returns the sizes of an attempt's objects."""
        found = self._storage.sizes(f"{step_name(step)}/{save_id}")
        return {name.removeprefix(f"{step_name(step)}/"): size for name, size in found.items()}

    def publish(self, step: int, save_id: str, manifest: bytes) -> None:
        """Creates the manifest; raises if there already is one."""
        if not self._storage.create(f"{step_name(step)}/{MANIFEST}", manifest):
            raise CheckpointError(
                f"{self.url}/{step_name(step)}/{MANIFEST}: another run has saved this step here; "
                "give each run its own prefix"
            )

    def abandon(self, step: int, save_id: str) -> None:
        """Removes the objects of an attempt."""
        for name in self._storage.sizes(f"{step_name(step)}/{save_id}"):
            self._storage.delete(name)

    def release(self, step: int, save_id: str) -> None:
        """Does nothing: no locks are held."""

    def remove(self, step: int) -> None:
        """Removes a step, its manifest first."""
        self._storage.delete(f"{step_name(step)}/{MANIFEST}")
        for name in self._storage.sizes(step_name(step)):
            self._storage.delete(name)

    def set_aside(self, step: int, save_id: str) -> None:
        """Renames the manifest of a damaged step."""
        name = f"{step_name(step)}/{MANIFEST}"
        self._storage.write(f"{name}.damaged-{save_id}", self._storage.read(name))
        self._storage.delete(name)

    def sweep(self) -> list[str]:
        """Removes unpublished attempts at steps up to the newest one.

        A run saves its steps in order, so no attempt at an older step is still in progress.
        """
        sizes = self._storage.sizes()
        newest = max(_published(sizes), default=-1)
        by_step: dict[int, list[str]] = {}
        for name in sizes:
            step = parse_step(name.partition("/")[0])
            if step is not None and step <= newest:
                by_step.setdefault(step, []).append(name)
        swept = [name for step, names in by_step.items() for name in self._left_behind(step, names)]
        for name in swept:
            self._storage.delete(name)
        return swept

    def _left_behind(self, step: int, names: list[str]) -> list[str]:
        """Returns the files of attempts that are neither published nor set aside."""
        manifests = [name for name in names if name.split("/")[1].startswith(MANIFEST)]
        attempts = {name.split("/")[1] for name in names if name not in manifests}
        if len(attempts) <= len(manifests):
            return []
        kept = {
            decode_manifest(self._storage.read(name), f"{self.url}/{name}").save_id
            for name in manifests
            if name.endswith(MANIFEST)
        }
        if len(kept) < len(manifests):
            return []  # One was set aside as damaged, and its files cannot be identified.
        return [name for name in names if name not in manifests and name.split("/")[1] not in kept]


def _published(names: Iterable[str]) -> set[int]:
    parts = (name.split("/") for name in names)
    found = (parse_step(part[0]) for part in parts if len(part) == 2 and part[1] == MANIFEST)
    return {step for step in found if step is not None}
