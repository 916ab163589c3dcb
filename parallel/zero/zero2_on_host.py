"""ZeRO 2 with fp32 masters, optimizer states and updates on the host: DeepSpeed's ZeRO-Offload (arXiv:2101.06840).

In 16 bits a rank's part of the gradients is summed on the device in fp32, and copied to the host during a step's last
backward pass; in fp32 DeepSpeed sums it on the host. torch's own optimizer updates it on the host's cores, and the
rank's part of the weights is copied back in their dtype.
"""

from torch import Tensor

from parallel.zero.fragments import position
from parallel.zero.sharding import HeldGradient
from parallel.zero.zero12 import Zero2


class Zero2OnHost(Zero2):
    """ZeRO 2 with its state on the host. After a step's passes the gradients are there too, flat in fp32 by group."""

    masters_on_host = True

    def gradients(self) -> list[HeldGradient]:
        """The weights with the parts of their gradients in this rank's partitions; waits until they are on the host."""
        optimizer, found = self.optimizer, list[HeldGradient]()
        for group, parameters in enumerate(optimizer.params_in_partition):
            flat = self.flat_gradient(optimizer.single_partition_of_fp32_groups[group])
            for parameter in parameters:
                _, _, offset, numel = optimizer.grad_position[optimizer.get_param_id(parameter)]
                found.append((parameter, flat.narrow(0, offset, numel), 1))
        return found

    def run_step(self, norm: Tensor) -> bool:
        """DeepSpeed's step with this norm; returns whether the gradients were dropped because it is not finite.

        DeepSpeed 0.19.8, with the optimizer on the host and fp32 sums, keeps the device's sums when it drops gradients.
        The next step would add to them, so they are removed here.
        """
        skipped = super().run_step(norm)
        if skipped:
            sums = self.optimizer.averaged_gradients
            sums.update(dict.fromkeys(sums))
        return skipped

    def flat_gradient(self, flat: Tensor) -> Tensor:
        """The gradient (1-D, on the host) of the partition ``flat``; waits until its copy there has ended."""
        self.optimizer._wait_for_offload_copies()
        partitions = self.optimizer.single_partition_of_fp32_groups
        return partitions[position(partitions, flat)].grad.view(-1)
