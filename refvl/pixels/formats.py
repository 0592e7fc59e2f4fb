"""The picture formats that are read: those that Pillow itself decodes here and now."""

from functools import cache

from PIL import Image, ImageFile

_NEVER_DECODED = {"EPS", "MPEG"}  # drawn by Ghostscript, another program; Pillow only tells the size


@cache
def readable_formats() -> tuple[str, ...]:
    """Return the names of Pillow's formats that have a decoder, in the order in which Pillow tries them."""
    Image.init()
    readers = {name: Image.OPEN[name][0] for name in Image.ID if name in Image.OPEN and name not in _NEVER_DECODED}
    stub = ImageFile.StubImageFile
    return tuple(
        name for name, reader in readers.items() if not (isinstance(reader, type) and issubclass(reader, stub))
    )


def image_suffixes() -> frozenset[str]:
    """Return the suffixes, such as ".png", of the files that `load_image` reads.

    Some of Pillow's formats are left out. Stubs (BUFR, GRIB, HDF5, WMF) need a handler that another package installs,
    EPS is drawn by another program, and for MPEG Pillow only tells the size.
    """
    return frozenset(suffix for suffix, format in Image.registered_extensions().items() if format in readable_formats())
