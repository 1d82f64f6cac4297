# What a site's users activate: TRAINING is where the interpreter with torch and its commands are.
export PATH=$TRAINING:$PATH
export OMP_NUM_THREADS=1
