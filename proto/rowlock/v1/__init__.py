"""The contract: messages and services of ``rowlock.v1``, and the table of error reasons."""
