"""One thread owns a model: requests wait in its queue, and are answered together as far as the model allows it."""

from semgrad_guard.engine.worker.request import Pieces, PieceStream, Request, TextStream, Ticket, outcomes
from semgrad_guard.engine.worker.worker import Batching, Worker, worker_of

__all__ = ["Batching", "PieceStream", "Pieces", "Request", "TextStream", "Ticket", "Worker", "outcomes", "worker_of"]
