"""Users' functions, copied from slime's documentation where it shows code."""

import torch


def check_reward_nonzero_std(args, samples, **kwargs):
    rewards = [sample.get_reward_value(args) for sample in samples]
    return torch.tensor(rewards, dtype=torch.float).std() > 0.0


def sort_by_reward_std(args, samples, **kwargs):
    samples_with_std = []
    for group in samples:
        rewards = [item.reward for item in group]
        std = torch.tensor(rewards, dtype=torch.float).std()
        samples_with_std.append((group, std))
    samples_with_std.sort(key=lambda x: x[1], reverse=True)
    return [item[0] for item in samples_with_std]


def pop_first(args, rollout_id, buffer, num_samples):
    num_to_pop = min(len(buffer), num_samples)
    samples = buffer[:num_to_pop]
    del buffer[:num_to_pop]
    return samples


def custom_buffer_filter(args, rollout_id, buffer, num_samples):
    sorted_buffer = sorted(buffer, key=lambda x: x[0].reward, reverse=True)
    return sorted_buffer[:num_samples]


async def custom_rm(args, sample, **kwargs):
    return 1 if sample.response == sample.label else 0


async def custom_group_rm(args, samples, **kwargs):
    longest = max(sample.response_length for sample in samples)
    return [{"score": sample.response_length / longest, "rank": 0} for sample in samples]


def generate_rollout(args, rollout_id, data_buffer, evaluation=False):
    assert args.rollout_global_dataset
    samples = data_buffer.get_samples(args.rollout_batch_size)
    for group in samples:
        for position, sample in enumerate(group):
            sample.tokens = [1, 2, 3]
            sample.response_length = 2
            sample.reward = {"score": float(position), "length": 2}
            sample.loss_mask = [1] * sample.response_length
            sample.status = sample.Status.COMPLETED
            sample.metadata["raw_reward"] = float(position)
    return samples
