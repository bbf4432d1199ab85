"""What other loaders test, and which of our tests is about it.

Verdicts: K, kept as it is; A, adapted; B, better on purpose; N, not applicable, with the reason.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Behaviour(NamedTuple):
    """One behaviour of a peer's, and ours."""

    peer: Literal["torch", "torchdata", "tensorpack"]
    group: str
    theirs: str  # the peer's tests, or the case
    checks: str
    verdict: Literal["K", "A", "B", "N"]
    ours: tuple[str, ...] = ()  # test files and functions below tests/
    note: str = ""  # the reason for N; what is adapted or better


def _torch(
    group: str,
    theirs: str,
    checks: str,
    verdict: Literal["K", "A", "B", "N"],
    *ours: str,
    note: str = "",
) -> Behaviour:
    return Behaviour("torch", group, theirs, checks, verdict, ours, note)


def _data(
    theirs: str, checks: str, verdict: Literal["K", "A", "B", "N"], *ours: str, note: str = ""
) -> Behaviour:
    return Behaviour("torchdata", "state", theirs, checks, verdict, ours, note)


def _pack(case: str, *ours: str, note: str = "") -> Behaviour:
    return Behaviour("tensorpack", "cases", case, case, "K", ours, note)


HERE = "conformance/test_behaviours.py::test_"
BESIDE = "conformance/test_beside_torch.py::test_"
TORCH = "conformance/test_torch.py::test_"
BATCHING = "unit/test_batching.py::test_"
COLLATE = "unit/test_collate.py::test_"
DEATHS = "unit/test_deaths.py::test_"
DISPATCH = "unit/test_dispatch.py::test_"
END = "unit/test_end.py::test_"
EPOCHS = "unit/test_epochs.py::test_"
ERRORS = "unit/test_errors.py::test_"
HOSTS = "unit/test_hosts.py::test_"
MODES = "unit/test_modes.py::test_"
SAMPLERS = "unit/test_samplers.py::test_"
SEEDS = "unit/test_seeds.py::test_"
SOURCES = "unit/test_sources.py::test_"
START = "unit/test_start_methods.py::test_"
STATE = "unit/test_state.py::test_"
WINDOW = "unit/test_window.py::test_"
JOURNEYS = "resume/test_journeys.py::test_"
CHAOS = "chaos/test_faults.py::test_fault"

ARGUMENTS = [
    _torch(
        "arguments",
        "test_invalid_ctor_args_combinations",
        "combinations that cannot be meant are refused",
        "K",
        BATCHING + "refused",
        BATCHING + "each_refusal_has_its_own_words",
    ),
    _torch(
        "arguments",
        "test_invalid_assign_after_init",
        "arguments cannot be assigned later",
        "K",
        HERE + "arguments_are_fixed",
    ),
    _torch(
        "arguments",
        "test_excessive_thread_creation_warning",
        "very many workers are warned of",
        "A",
        HERE + "more_workers_than_descriptors_are_refused_before_any_starts",
        note="workers that wait for data may outnumber the cores; what cannot be started is "
        "refused before any is",
    ),
    _torch(
        "arguments",
        "test_typing",
        "classes can be subscripted by the type of a batch",
        "K",
        HERE + "types_say_what_a_batch_is",
    ),
    _torch(
        "arguments",
        "test_multiprocessing_contexts",
        "each start method, by name and as an object, gives the same data",
        "K",
        START + "names_and_contexts",
        MODES + "other_start_methods",
    ),
    _torch(
        "arguments",
        "test_multiple_dataloaders",
        "two loaders of other contexts side by side",
        "K",
        HERE + "two_with_other_contexts_side_by_side",
    ),
    _torch(
        "arguments",
        "test_builtin_collection_conversion",
        "the whole as a list",
        "A",
        MODES + "processes_give_what_the_reference_gives",
        note="an async comprehension takes the place of list()",
    ),
    _torch(
        "arguments",
        "test_growing_dataset",
        "a dataset that grows",
        "A",
        HERE + "what_grows_is_seen_when_workers_start_anew",
        note="the content is fixed while workers are up",
    ),
]

ORDER = [
    _torch(
        "map-style",
        "test_sequential_nonbatch, _batch, _workers, test_seqential_batch_workers, _prefetch",
        "exact order under any number of workers and any window",
        "K",
        MODES + "processes_give_what_the_reference_gives",
        BATCHING + "batches",
        BESIDE + "map_style",
    ),
    _torch(
        "map-style",
        "test_shuffle, _batch_none, _batch, _workers, _batch_workers, _batch_workers_prefetch",
        "each item exactly once",
        "K",
        BATCHING + "shuffle_draws_each_index_once_anew_each_epoch",
        "unit/test_shuffle.py::test_it_is_a_bijection",
    ),
    _torch(
        "map-style",
        "test_bulk_loading_nobatch",
        "keys that are lists, without batches",
        "K",
        BATCHING + "keys_are_whatever_the_source_takes",
        BESIDE + "map_style",
    ),
    _torch(
        "map-style",
        "test_sampler, test_batch_sampler",
        "samplers of the user's, uneven batches",
        "A",
        BATCHING + "a_sampler_is_read_here",
        BATCHING + "a_batch_sampler_is_read_here",
        BESIDE + "samplers",
        note="samplers may be async too",
    ),
    _torch(
        "map-style",
        "test_len, test_iterabledataset_len",
        "the number of batches, where it is known",
        "K",
        MODES + "length_in_batches",
        MODES + "no_length",
    ),
    _torch(
        "map-style",
        "test_large_sampler_indices",
        "batches of 40,960 keys, an error and an iterator that is held end without a hang",
        "K",
        HERE + "large_batches_of_keys_an_error_and_a_held_iterator",
    ),
    _torch(
        "map-style",
        "test_ind_worker_queue",
        "which worker does which batch",
        "N",
        note="a batch goes to whoever is free, and nothing depends on who that is",
    ),
    _torch(
        "map-style",
        "test_error, test_error_workers",
        "one error for each bad item, and the iteration goes on",
        "K",
        ERRORS + "stage_under_policy_in_a_process",
        ERRORS + "stage_under_policy_on_the_thread",
    ),
    _torch(
        "map-style",
        "test_numpy, test_numpy_scalars",
        "dtypes of batches",
        "A",
        COLLATE + "batch",
        note="numpy's dtypes; torch's with aioprefetch.torch.collate",
    ),
    _torch(
        "order",
        "test_in_order_index_ds",
        "a slow head holds up the order, not the work",
        "K",
        MODES + "processes_give_what_the_reference_gives",
        DISPATCH + "what_is_finished_is_reported_while_a_slow_item_runs",
    ),
    _torch(
        "order",
        "test_out_of_order_index_ds",
        "unordered, what waits behind a slow item",
        "B",
        MODES + "a_slow_item_holds_up_nobody",
        DISPATCH + "a_slow_item_holds_up_its_neighbours_for_milliseconds",
        note="only the slow item is late: what waits behind it is taken back",
    ),
    _torch(
        "order",
        "test_in_order_iterable_ds",
        "streams take turns",
        "A",
        HERE + "streams_take_turns",
        note="a function of the number of streams, not of workers",
    ),
    _torch(
        "order",
        "test_out_of_order_iterable_ds",
        "a quick stream is not held up by a slow one",
        "A",
        HERE + "a_quick_stream_does_not_wait_for_a_slow_one",
        note="streams, where torch has workers",
    ),
    _torch(
        "order",
        "not tested by torch",
        "the window is never exceeded; unordered starves no item",
        "K",
        WINDOW + "no_more_is_begun_than_was_asked_for",
        DISPATCH + "a_slow_item_among_quick_ones_is_waited_for_alone",
    ),
]

ITERABLES = [
    _torch(
        "iterables",
        "test_iterable_style_dataset",
        "uneven shards, short tails, drop_last",
        "A",
        MODES + "processes_give_what_the_reference_gives",
        BESIDE + "iterables_that_divide_themselves",
        note="no item comes twice unless that was asked for",
    ),
    _torch(
        "iterables",
        "test_chain_iterable_style_dataset",
        "datasets that are added",
        "N",
        note="itertools.chain does it",
    ),
    _torch(
        "iterables",
        "test_error_in_init",
        "errors of __iter__ and worker_init_fn arrive",
        "B",
        START + "worker_init_fn_that_raises",
        ERRORS + "odd_errors_while_starting",
        ERRORS + "odd_errors_end_their_stream_alone",
        note="those of the start come at the start, once",
    ),
    _torch(
        "iterables",
        "test_multi_epochs_reproducibility",
        "epochs repeat under the same seed",
        "K",
        SEEDS + "set_epoch_seeks",
        SEEDS + "streams_of_workers_repeat",
    ),
    _torch(
        "iterables",
        "test_dataset_not_reset",
        "workers that live on keep their copy",
        "A",
        SOURCES + "every_copy_is_told_once_that_it_is_one_and_of_each_epoch",
        note="and are told of each epoch",
    ),
]

WORKERS = [
    _torch(
        "seeds",
        "test_worker_seed",
        "workers draw apart",
        "K",
        SEEDS + "no_two_places_draw_alike",
        SEEDS + "the_generators_of_a_process_are_seeded_apart",
    ),
    _torch(
        "seeds",
        "test_worker_seed_reproducibility",
        "the same seeds again",
        "B",
        SEEDS + "the_data_do_not_depend_on_who_makes_them",
        TORCH + "torch_is_seeded_by_item",
        note="whatever the number of workers",
    ),
    _torch(
        "seeds",
        "test_shuffle_reproducibility, test_sampler_reproducibility",
        "a seed fixes the order",
        "K",
        BATCHING + "shuffle_draws_each_index_once_anew_each_epoch",
        "unit/test_shuffle.py::test_the_order_never_changes",
    ),
    _torch(
        "seeds",
        "test_numpy_gen_state",
        "fixed vectors of seeds",
        "A",
        SEEDS + "the_default_seed_is_fixed",
        SAMPLERS + "keys_never_change",
        note="our own keys, of places instead of workers",
    ),
    _torch(
        "seeds",
        "test_worker_init_fn",
        "a function that runs first in each worker",
        "K",
        START + "worker_init_fn",
    ),
    _torch(
        "seeds",
        "test_get_worker_info",
        "what a function can know of its worker; None in the parent",
        "K",
        START + "no_worker_info_in_the_parent",
        TORCH + "torch_knows_its_workers",
        TORCH + "a_thread_is_not_torch_s_worker",
    ),
    _torch(
        "seeds",
        "test_set_affinity_in_worker_init",
        "an affinity that is set there sticks",
        "K",
        HERE + "affinity_that_is_set_in_a_worker_sticks",
    ),
    _torch(
        "seeds",
        "test_random_sampler, _len_*, test_distributed_sampler_invalid_rank, "
        "test_duplicating_data_with_drop_last",
        "what samplers draw, and how hosts divide it",
        "A",
        SAMPLERS + "all_indices_are_equally_likely",
        SAMPLERS + "what_cannot_be_meant_is_refused",
        HOSTS + "hosts_take_every_nth_of_one_order",
        HOSTS + "what_is_refused",
        note="hosts are rank and world_size, for every sampler",
    ),
]

FAILURES = [
    _torch(
        "failures",
        "test_segfault",
        "a worker that crashes is named, with the signal",
        "K",
        DEATHS + "a_death_says_who_and_how",
        DEATHS + "an_item_that_kills_fails_alone",
    ),
    _torch(
        "failures",
        "test_no_segfault",
        "fork in a process with threads",
        "A",
        START + "fork_warns_once_at_the_callers_line",
        note="fork is warned of, and never the default",
    ),
    _torch(
        "failures",
        "test_conv_after_fork",
        "libraries with threads before a fork",
        "A",
        START + "the_default_is_forkserver",
        note="as above",
    ),
    _torch(
        "failures",
        "test_timeout",
        "work that takes too long",
        "B",
        DEATHS + "an_item_that_hangs_is_given_up",
        DEATHS + "a_time_out_says_where_it_was_stuck",
        WINDOW + "a_timeout_loses_and_repeats_nothing",
        note="of an item, and the worker is replaced; asyncio.timeout works too",
    ),
    _torch(
        "failures",
        "test_fd_limit_exceeded",
        "batches that are held and few descriptors",
        "A",
        HERE + "batches_that_are_held_take_no_descriptors",
        note="they take none",
    ),
    _torch(
        "failures",
        "test_partial_workers",
        "a pass that is left ends its workers",
        "K",
        END + "nothing_is_left_after",
        END + "nothing_is_left_of_what_is_dropped",
    ),
    _torch(
        "failures",
        "test_early_exit",
        "a script that ends in the middle",
        "K",
        END + "nothing_outlives_the_process",
    ),
    _torch(
        "failures",
        "test_proper_exit",
        "no process is left, whoever dies and whatever is held",
        "B",
        END + "nothing_outlives_the_process",
        DEATHS + "workers_killed_at_random_are_replaced",
        CHAOS,
        note="killed workers and a killed parent are tried too, under each start method",
    ),
    _torch(
        "failures",
        "SynchronizedDataset",
        "a helper: each worker surely gets an item",
        "N",
        note="a helper of their tests",
    ),
    _torch(
        "failures",
        "not tested by torch",
        "a killed parent; Ctrl-C; two iterators over one pool",
        "K",
        END + "nothing_outlives_the_process",
        MODES + "a_second_pass_supersedes_the_first",
        CHAOS,
    ),
]

COLLATING = [
    _torch(
        "collate",
        "test_default_convert_mapping_keep_type",
        "items without batches keep their type: mappings",
        "A",
        BATCHING + "items_without_batches_are_delivered_as_they_are",
        note="nothing is converted",
    ),
    _torch(
        "collate",
        "test_default_convert_sequence_keep_type",
        "items without batches keep their type: sequences",
        "A",
        BATCHING + "items_without_batches_are_delivered_as_they_are",
        note="nothing is converted",
    ),
    _torch(
        "collate",
        "test_default_convert_sequence_dont_keep_type",
        "a range becomes a list",
        "A",
        BATCHING + "items_without_batches_are_delivered_as_they_are",
        note="nothing is converted",
    ),
    _torch(
        "collate",
        "test_default_collate_dtype",
        "numbers become int64, float64, bool; text stays",
        "A",
        COLLATE + "batch",
        BESIDE + "the_default_collate_of_torch",
        note="numpy's dtypes",
    ),
    _torch(
        "collate",
        "test_default_collate_mapping_keep_type, _sequence_keep_type, _sequence_dont_keep_type",
        "containers keep their type where they can",
        "A",
        COLLATE + "batch",
        COLLATE + "a_copy_keeps_what_a_container_holds_besides_values",
        note="tuples stay tuples",
    ),
    _torch(
        "collate",
        "test_default_collate_bad_numpy_types",
        "arrays of objects are refused",
        "A",
        COLLATE + "error",
        note="fixed-width text is stacked",
    ),
    _torch(
        "collate",
        "test_default_collate_numpy_memmap",
        "rows of a memory map are stacked",
        "A",
        COLLATE + "memmap",
        note="into an array",
    ),
    _torch(
        "collate",
        "test_default_collate_bad_sequence_type",
        "sequences of other lengths are refused",
        "A",
        COLLATE + "error",
        COLLATE + "each_error_names_path_and_way_out",
        note="the error names the path",
    ),
    _torch(
        "collate",
        "test_default_collate_shared_tensor",
        "in a worker the batch is made in shared memory",
        "A",
        DISPATCH + "an_array_made_in_place_is_recognised",
        TORCH + "a_batch_is_written_once_and_handed_over_where_it_was",
        note="arrays and tensors",
    ),
    _torch(
        "collate",
        "test_dataloader_with_namedtuple",
        "namedtuples keep their class, batched or not",
        "K",
        COLLATE + "batch",
        BESIDE + "map_style",
    ),
    _torch(
        "collate",
        "TestDictDataLoader.test_sequential_batch",
        "dicts of arrays",
        "K",
        BATCHING + "batches_are_stacked",
        BESIDE + "map_style",
    ),
    _torch(
        "collate",
        "TestStringDataLoader.test_shuffle_pin_memory",
        "text comes through",
        "K",
        COLLATE + "batch",
        BESIDE + "map_style",
    ),
]

TORCH_ONLY = [
    _torch(
        "torch's own",
        "test_sequential_pin_memory, test_shuffle_pin_memory, TestDictDataLoader.test_pin_memory, "
        "_device, _with_only_device",
        "tensors in page-locked memory",
        "N",
        note="torch's alone; transfer is the general hook, and aioprefetch.torch.to uses it",
    ),
    _torch(
        "torch's own",
        "test_custom_batch_pin, test_custom_batch_pin_worker",
        "types with a pin_memory of their own",
        "N",
        note="torch's alone; transfer can call it",
    ),
    _torch(
        "torch's own",
        "test_nested_tensor_multiprocessing",
        "nested tensors",
        "N",
        note="torch's alone: they travel as torch pickles them, and are not stacked",
    ),
    _torch(
        "torch's own",
        "test_multiprocessing_iterdatapipe",
        "functions of modules under each start method",
        "A",
        START + "names_and_contexts",
        note="for any source",
    ),
    _torch(
        "torch's own",
        "test_multiprocessing_iterdatapipe_with_dill",
        "lambdas under spawn",
        "B",
        START + "lambdas_closures_and_local_classes",
        note="they work",
    ),
    _torch(
        "torch's own",
        "test_shuffler_iterdatapipe",
        "the seed of an epoch fixes a shuffle",
        "K",
        SEEDS + "each_epoch_draws_anew",
        SEEDS + "set_epoch_seeks",
    ),
    _torch(
        "torch's own",
        "TestDatasetRandomSplit, TestTensorDataset, TestStackDataset, TestConcatDataset",
        "datasets made of datasets",
        "N",
        note="torch's own classes work as sources: test_beside_torch.py",
    ),
    _torch(
        "torch's own",
        "TestStackDataset, __getitems__",
        "__getitems__ gives one result for each key",
        "K",
        SOURCES + "a_miscount_of_getitems_is_an_error",
        HERE + "a_part_of_a_source_is_one",
    ),
]

STATES = [
    _data(
        "test_no_mp, test_mp_x, test_mp_pw, test_mp_every_n_steps, test_random_state",
        "interrupted anywhere, the rest equals that of the whole run",
        "K",
        JOURNEYS + "in_order_it_is_the_run_that_was_never_interrupted",
        STATE + "states_before_in_and_after_an_epoch",
    ),
    _data(
        "TestSnapshotZero",
        "a state from before the first item restores a whole run",
        "K",
        STATE + "a_state_needs_no_workers_and_survives_a_round",
    ),
    _data(
        "TestSnapshotEnd",
        "a state from the end leads to the next epoch",
        "K",
        STATE + "states_before_in_and_after_an_epoch",
    ),
    _data(
        "test_map_iterrupted_shuffle",
        "a shuffled epoch from two places",
        "K",
        STATE + "states_before_in_and_after_an_epoch",
        JOURNEYS + "in_order_it_is_the_run_that_was_never_interrupted",
    ),
    _data(
        "test_num_workers_mismatch",
        "another number of workers",
        "B",
        JOURNEYS + "in_processes",
        STATE + "streams_keep_their_number_on_other_workers",
        note="any number will do; torchdata raises",
    ),
    _data(
        "test_two_dataloaders",
        "two at once",
        "K",
        HERE + "two_with_other_contexts_side_by_side",
    ),
    _data(
        "test_fast_state_dict_request, _skip_steps, RoundRobin",
        "a state right after a resume is complete",
        "K",
        JOURNEYS + "on_a_thread",
        STATE + "a_state_needs_no_workers_and_survives_a_round",
    ),
    _data(
        "test_json_serde_single_process, _multi_process, _map",
        "states survive JSON",
        "K",
        STATE + "json_keeps_a_state",
        STATE + "a_state_that_json_does_not_keep_is_pickled",
    ),
    _data(
        "test_initial_state, test_load_state_after_initial_state_dict, _before_, "
        "test_load_then_state",
        "loading and saving at once gives the same state",
        "K",
        STATE + "a_state_needs_no_workers_and_survives_a_round",
        STATE + "a_start_that_failed_has_not_used_the_state",
    ),
    _data(
        "test_init_error, test_iteration_error",
        "errors keep their type",
        "K",
        ERRORS + "odd_errors",
        ERRORS + "odd_errors_while_starting",
    ),
    _data(
        "TestDynamicState.test",
        "a state is not changed later",
        "K",
        STATE + "a_state_is_not_changed_later",
    ),
    _data(
        "TestDatasetIteratorStateDuplication.test",
        "a dataset that is its own iterator is saved once",
        "N",
        note="a state has one place for each sequence",
    ),
    _data(
        "test_multi_epoch_sdl, TestMultiEpochState",
        "two epochs, saved, and two more are four",
        "K",
        STATE + "two_epochs_and_two_more_are_four",
    ),
    _data(
        "test_end_of_epoch_behavior",
        "a state in the loop after the last batch, and one after the loop",
        "K",
        STATE + "states_before_in_and_after_an_epoch",
    ),
    _data(
        "test_notstatefulSDL",
        "a sampler without a state is read again",
        "K",
        STATE + "keys_are_passed_over_not_data",
        STATE + "a_sequence_that_does_not_repeat_itself_is_an_error",
    ),
    _data(
        "TestSingleIterCalled",
        "iter() is called once a worker when it goes on",
        "A",
        HERE + "a_stream_that_goes_on_is_iterated_once",
        note="once a stream",
    ),
    _data(
        "test_out_of_order_index_ds, test_out_of_order_iterable_ds_one_completed_worker",
        "unordered and gone on with",
        "B",
        JOURNEYS + "on_a_thread",
        JOURNEYS + "in_processes",
        note="under other timing and other workers too; torchdata loses and repeats items then",
    ),
]

CASES = [
    _pack("order for num_proc=1 over three epochs", MODES + "each_pass_is_the_next_epoch"),
    _pack(
        "each item once for a mapped flow",
        MODES + "processes_give_what_the_reference_gives",
    ),
    _pack("left early, then a fresh epoch", MODES + "a_pass_that_is_left_counts_as_one"),
    _pack("a second iterator", MODES + "a_second_pass_supersedes_the_first"),
    _pack(
        "a length of 0, a wrong one, none",
        MODES + "length_in_batches",
        MODES + "a_wrong_length_of_an_iterable_is_not_believed",
        MODES + "no_length",
    ),
    _pack(
        "iterated before it is started",
        WINDOW + "a_pass_that_is_not_opened_prefetches_from_its_first_anext",
    ),
    _pack("started twice", HERE + "starting_and_closing_twice"),
    _pack(
        "a worker that raises: in an item, in its set-up, in the last item, odd exceptions",
        ERRORS + "odd_errors",
        START + "worker_init_fn_that_raises",
        ERRORS + "odd_errors_while_starting",
    ),
    _pack(
        "an exception behind a full buffer of large items",
        HERE + "an_error_behind_a_full_window_of_large_items",
    ),
    _pack("a worker that is killed", DEATHS + "workers_killed_at_random_are_replaced"),
    _pack(
        "how far is read ahead, exactly",
        WINDOW + "a_stopped_consumer_finds_the_window_full",
        WINDOW + "a_sampler_is_read_no_further_ahead",
    ),
    _pack(
        "a consumer that is slower, and one that is faster",
        WINDOW + "a_stopped_consumer_finds_the_rest_of_the_epoch",
        "unit/test_loop.py::test_a_step_that_blocks_finds_its_next_batches_ready",
    ),
    _pack("pools in pools", START + "nested_replicas", START + "nested_shards"),
    _pack(
        "the parent's end, by SIGKILL, SIGTERM, SIGINT or itself, leaves no process",
        END + "nothing_outlives_the_process",
    ),
    _pack("closed twice", HERE + "starting_and_closing_twice"),
    _pack("started from a thread that ends", HERE + "a_loop_in_a_thread_that_ends"),
    _pack("each start method", MODES + "other_start_methods"),
    _pack("lambdas under spawn", START + "lambdas_closures_and_local_classes", note="they work"),
    _pack(
        "seeds that differ by worker and repeat",
        MODES + "replicas_have_their_own_sequences_fixed_by_the_seed",
    ),
    _pack("memory over 100 epochs", HERE + "memory_is_flat_over_100_epochs"),
]

BEHAVIOURS = [
    *ARGUMENTS,
    *ORDER,
    *ITERABLES,
    *WORKERS,
    *FAILURES,
    *COLLATING,
    *TORCH_ONLY,
    *STATES,
    *CASES,
]
