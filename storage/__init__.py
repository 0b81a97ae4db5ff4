"""Content-addressed artifacts on fsspec, the KL grid on zarr, and digests."""
