"""Probing a model: where it keeps the meaning of a prompt, where SemGrad works, and which t* follows from that."""
