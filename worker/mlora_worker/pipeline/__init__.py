"""One stage of the pipeline: links and transport between ranks, the engine that computes, the loop that joins them."""
