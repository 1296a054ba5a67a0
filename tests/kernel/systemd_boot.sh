# Run by systemd_host.py as the first process of new pid, mount, cgroup, net, uts and ipc namespaces.
# Builds a root of its own over the machine's (an overlay whose upper layer is memory) and becomes
# systemd in it. On the machine's own root systemd would empty /tmp and change settings.
#   $1 an empty folder, $2 a folder with udev's files or "", $3 the checkout, $4 its dependencies
set -eu
work=$1 udev=$2 checkout=$3 dependencies=$4
mount --make-rprivate /
mount -t tmpfs tmpfs "$work"
cd "$work"
mkdir upper work root
mount -t overlay overlay -o "lowerdir=/,upperdir=$work/upper,workdir=$work/work" root
cd root
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
# Settings that are not a namespace's own stay as they are.
mount --bind proc/sys proc/sys
mount -o remount,ro,bind proc/sys
for folder in run tmp dev; do mount -t tmpfs -o mode=755 tmpfs $folder; done
# Not the machine's /dev: udevd would make links there.
for node in null zero full random urandom tty; do
    touch dev/$node
    mount --bind /dev/$node dev/$node
done
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=666 devpts dev/pts
mount -t tmpfs tmpfs dev/shm
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd

# A bare systemd: none of the machine's own units, nothing generated from its fstab.
rm -rf etc/systemd/system etc/systemd/system.conf.d etc/fstab lib/systemd/system-generators
mkdir -p etc/systemd/system
if [ -n "$udev" ]; then
    cp -a "$udev/bin/." usr/bin/
    cp -a "$udev/lib/." usr/lib/
fi
# What else these targets would start wants a whole machine.
rm -rf lib/systemd/system/*.target.wants etc/udev/rules.d
cat >etc/systemd/system/test.target <<UNIT
[Unit]
Wants=systemd-journald.service systemd-udevd.service
After=systemd-journald.service systemd-udevd.service
UNIT
# systemd listens to udev only where this is there when it starts (sd-device's monitor).
mkdir run/udev run/netns
touch run/udev/control

# tlsched where services may read it: the unit hides /home and /root.
mkdir -p opt/checkout opt/dependencies
mount --bind "$checkout" opt/checkout
mount --bind "$dependencies" opt/dependencies
/usr/bin/python3 -m venv --without-pip opt/tlsched
printf '%s\n' /opt/checkout /opt/dependencies >"$(echo opt/tlsched/lib/python3*/site-packages)/here.pth"
cat >opt/tlsched/bin/tlsched <<'COMMAND'
#!/opt/tlsched/bin/python
from tlsched.cli import main

main()
COMMAND
chmod 755 opt/tlsched/bin/tlsched

mkdir .old
pivot_root . .old
umount -l .old
rmdir .old
exec env -i PATH=/usr/sbin:/usr/bin container=other /lib/systemd/systemd --system \
    --unit=test.target --log-target=journal --show-status=no </dev/null
