"""The CPU binding: host memory as the device."""
