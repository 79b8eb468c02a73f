"""Streaming long-tuning: long sequences of a causal generator, trained chunk by chunk.

As LongLive (arXiv:2509.22622) trains: a sequence grows by chunks with overlap, generator and critic
steps take one chunk after the other, and the prompt switches once on the way. In a step::

    sequence = StreamingSequence(options, Generator(network, cache, NoiseSchedule(config)), ...)
    for kind in passes(options, step):
        chunk = sequence.next_chunk(trains_generator=kind == "generator")
        noised = noised_chunk(chunk, schedule, seed, kind)
        if kind == "generator":
            direction = generator_direction(chunk, noised, critic=..., teacher=..., ...)
            for total, count, report in generator_losses(chunk, direction, sequence):
                (total / counts).backward()
        else:
            total, count, report = critic_chunk_loss(chunk, noised, critic)

`network` says what networks and caches must do, `options` which behaviour is LongLive's.
"""
