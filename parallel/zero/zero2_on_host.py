"""ZeRO 2 whose fp32 masters and optimizer states are the host's, by DeepSpeed's ZeRO-Offload (arXiv:2101.06840).

In 16 bits a rank's part of the gradients is summed on the device in fp32, and goes to the host with a step's last
backward pass; in fp32 DeepSpeed sums it on the host. The update runs on the host's cores by torch's own optimizer, and
the rank's part of the weights comes back in their dtype.
"""

from torch import Tensor

from parallel.zero.fragments import position
from parallel.zero.sharding import HeldGradient
from parallel.zero.zero12 import Zero2


class Zero2OnHost(Zero2):
    """Gradients, too, are on the host when a step's passes have ended: each group's in one flat fp32 tensor."""

    masters_on_host = True

    def gradients(self) -> list[HeldGradient]:
        """The parts that lie in this rank's partitions; the host waits until they have arrived."""
        optimizer, found = self.optimizer, list[HeldGradient]()
        for group, parameters in enumerate(optimizer.params_in_partition):
            flat = self.flat_gradient(optimizer.single_partition_of_fp32_groups[group])
            for parameter in parameters:
                _, _, offset, numel = optimizer.grad_position[optimizer.get_param_id(parameter)]
                found.append((parameter, flat.narrow(0, offset, numel), 1))
        return found

    def run_step(self, norm: Tensor) -> bool:
        """As Sharding. What DeepSpeed does about overflows leaves the device's sums, which the next step would add to.

        So it is in 0.19.8, where the host holds the optimizer and gradients are summed in fp32.
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
