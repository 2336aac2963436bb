"""From a prompt to an answer: decoding, sampling, streams, and the evidence an answer leaves."""
